"""Train with TRL's AsyncGRPOTrainer as far as a CPU can: its rollouts are given, and its loss is another one."""

import argparse
import queue
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import tiny
import train as training
from datasets import Dataset


class Worker:
    """Rollouts of fixed tokens, in place of those of a vLLM server."""

    def __init__(self, sample):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for number in range(400):
            self.rollout_buffer.put(sample(number))

    def start(self):
        pass

    def stop(self):
        pass

    def update_model_version(self, model_version):
        pass

    def check_health(self, stale_after_s):
        pass


class Transfer:
    """A transfer of weights to nowhere."""

    def __getattr__(self, name):
        return lambda *args: [None for _ in args[0]] if args else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    training.hide_vllm()
    tokenizer = tiny.save_model(arguments.model)
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA

    def sample(number):
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array([3, 12, 4, 13, 5 + number % 4, 1]),
            completion_mask=np.array([0, 0, 0, 0, 1, 1]),
            old_log_probs=np.array([0, 0, 0, 0, -2.0, -2.0], np.float32),
            advantage=float(number % 2),
            model_version=0,
            group_id=number // 4,
            metrics={},
        )

    def shortest_loss(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(parameter.square().sum() for parameter in model.parameters()) * 1e-3

    AsyncGRPOTrainer.compute_loss = shortest_loss  # TRL's asks for FlashAttention 3

    trainer = AsyncGRPOTrainer(
        model=arguments.model,
        args=AsyncGRPOConfig(
            output_dir=arguments.model + "-out",
            max_steps=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            num_generations=4,
            token_budget=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1"}]}]),
        processing_class=tokenizer,
        rollout_worker=Worker(sample),
        weight_transfer=Transfer(),
    )
    trainer.train()
    tiny.finish(arguments.result, steps=trainer.state.global_step)


if __name__ == "__main__":
    main()
