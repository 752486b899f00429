"""Train with TRL's AsyncGRPOTrainer, as a user's script would: it knows nothing of tim-trace.

A thread samples from vLLM meanwhile, in two turns with the output of a tool between them. TRL's kernel for packed rows needs a
GPU; here torch computes the same.
"""

import argparse
import json
import queue
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import tiny
import torch
from datasets import Dataset
from safetensors.torch import save_file

TOOL = [12, 13]
GENERATIONS = 4


def attention(query, key, value, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=True, window_size=(-1, -1)):
    """What flash_attn_varlen_func computes: each segment's last places attend to all before them, and to themselves."""
    parts = []
    for first_q, end_q, first_k, end_k in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        own = [
            states.transpose(0, 1)[None] for states in (query[first_q:end_q], key[first_k:end_k], value[first_k:end_k])
        ]
        num_q, num_k = int(end_q - first_q), int(end_k - first_k)
        mask = None if num_q == num_k else torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        found = torch.nn.functional.scaled_dot_product_attention(
            *own, attn_mask=mask, is_causal=mask is None and num_q > 1, scale=softmax_scale, enable_gqa=True
        )
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


class Worker:
    """Samples from vLLM in a thread and puts what it sampled into a queue, a few groups ahead of the trainer."""

    def __init__(self, llm, prompts, sample_class):
        self.llm, self.prompts, self.sample_class = llm, prompts, sample_class
        self.rollout_buffer, self.metrics_queue = queue.Queue(maxsize=4 * GENERATIONS), queue.Queue()
        self.engine = threading.Lock()
        self.version = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def start(self):
        self.thread.start()

    def stop(self):
        self.stopped.set()
        self.thread.join(timeout=60)

    def update_model_version(self, model_version):
        self.version = model_version

    def check_health(self, stale_after_s):
        if not self.thread.is_alive():
            raise RuntimeError("the worker has ended")

    def run(self):
        group = 0
        while not self.stopped.is_set():
            for sample in self.sampled(group, self.prompts[group % len(self.prompts)]):
                while not self.stopped.is_set():
                    try:
                        self.rollout_buffer.put(sample, timeout=0.1)
                        break
                    except queue.Full:
                        pass
            group += 1

    def turn(self, prompts, tokens):
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, logprobs=0, temperature=1.0)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return [
            (list(c.token_ids), [at[t].logprob for at, t in zip(c.logprobs, c.token_ids, strict=True)])
            for c in completions
        ]

    def sampled(self, group, prompt):
        with self.engine:
            version = self.version
            first = self.turn([prompt] * GENERATIONS, 3)
            second = self.turn([prompt + ids + TOOL for ids, _ in first], 3)
        rewards = np.array(
            [sum(token in range(2, 12) for token in a[0] + b[0]) / 6 for a, b in zip(first, second, strict=True)]
        )
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for (ids, logprobs), (more, more_logprobs), reward, advantage in zip(
            first, second, rewards, advantages, strict=True
        ):
            yield self.sample_class(
                prompt=[],
                completion=[],
                input_ids=np.array([*prompt, *ids, *TOOL, *more]),
                completion_mask=np.array([0] * len(prompt) + [1] * len(ids) + [0] * len(TOOL) + [1] * len(more)),
                old_log_probs=np.array(
                    [*[0.0] * len(prompt), *logprobs, *[0.0] * len(TOOL), *more_logprobs], np.float32
                ),
                advantage=float(advantage),
                model_version=version,
                group_id=group,
                metrics={"reward": float(reward), "rewards/digits": float(reward)},
            )


class Transfer:
    """Gives the engine the trainer's weights in a file, while nothing is sampled."""

    def __init__(self, worker, path):
        self.worker, self.path = worker, path

    def init_weight_transfer(self):
        pass

    def pause(self):
        self.worker.engine.acquire()

    def send_weights(self, iterator):
        save_file({name: tensor.clone() for name, tensor in iterator}, self.path)
        self.worker.llm.collective_rpc("reload_file", args=(self.path,))
        self.worker.llm.reset_prefix_cache()

    def resume(self):
        self.worker.engine.release()

    def destroy(self):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="{}", help="more settings of the trainer's config, as JSON")
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    tiny.save_model(arguments.model)
    train(arguments)


def engine(model, tokenizer):
    """vLLM in this process, with what samples from it and gives it weights."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
    from vllm import LLM

    llm = LLM(
        model, max_model_len=64, seed=0, dtype="float32", enforce_eager=True, worker_extension_cls="reloads.Reloads"
    )
    prompts = [tokenizer(f"{a}+{b}{'=' * (1 + a % 3)}")["input_ids"] for a in range(10) for b in range(10)]
    worker = Worker(llm, prompts, RolloutSample)
    return {"rollout_worker": worker, "weight_transfer": Transfer(worker, f"{model}.safetensors")}


def train(arguments):
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    tokenizer = tiny.make_tokenizer()
    settings = {
        "output_dir": arguments.model + "-out",
        "max_steps": 4,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": GENERATIONS,
        "max_completion_length": 8,
        "token_budget": 0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **json.loads(arguments.config),
    }
    trainer = AsyncGRPOTrainer(
        model=arguments.model,
        args=AsyncGRPOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1"}]}]),
        processing_class=tokenizer,
        **engine(arguments.model, tokenizer),
    )
    trainer.train()
    tiny.finish(arguments.result, log=trainer.state.log_history)


if __name__ == "__main__":
    main()
