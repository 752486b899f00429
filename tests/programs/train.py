"""Train a tiny model with TRL, as a user's script would: it knows nothing of tim-trace."""

import argparse
import importlib
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import servers
import tiny
import torch
import transfers
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback


def digits(prompts, completions, **kwargs):
    return [sum(character.isdigit() for character in completion) / 6 for completion in completions]


def short(prompts, completions, **kwargs):
    return [-0.1 * len(completion) for completion in completions]


def sample_with_a_tool(prompts, trainer):
    """A rollout of fixed tokens: two sampled, two of a tool, one sampled."""
    rows = len(prompts)
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [[3, 4 + row % 4, 12, 13, 1] for row in range(rows)],
        "logprobs": [[-0.5, -0.25, 0.0, 0.0, -0.125]] * rows,
        "env_mask": [[1, 1, 0, 0, 1]] * rows,
    }


def pretend(version, without):
    """Make TRL look like another release."""
    import trl

    trl.__version__ = version
    if without:
        import importlib.abc
        import importlib.machinery

        source = Path(trl.__file__).parent / "trainer" / "grpo_trainer.py"

        class Renamed(importlib.machinery.SourceFileLoader):
            def get_data(self, path):
                data = super().get_data(path)
                return data.replace(without.encode(), f"{without}_renamed".encode()) if path == str(source) else data

            def path_stats(self, path):
                raise OSError("no cached bytecode of changed source")

        class Finder(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name != "trl.trainer.grpo_trainer":
                    return None
                return importlib.util.spec_from_loader(name, Renamed(name, str(source)))

        sys.meta_path.insert(1, Finder())


def hide_vllm():
    """Let TRL take vLLM for missing, where nothing uses it: importing it takes a third of a short training."""
    # TRL's package is lazy: the module is no attribute of it yet.
    importlib.import_module("trl.import_utils").is_vllm_available = lambda *_, **__: False


def lora(settings):
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", **settings)


class Dies(TrainerCallback):
    """Kills this process after a step, once what was recorded of it has had time to reach the disk."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)


def break_recorder():
    from tim_trace.tracer.recorder import Recorder

    def broken(*_, **__):
        return 1 / 0

    Recorder.add_sequences = broken


def break_parts():
    """Have every part of a recording but sequences and passes run out of memory."""
    from tim_trace.tracer.dense import Projection
    from tim_trace.tracer.hooks import trl_contract, trl_trainer
    from tim_trace.tracer.recorder import Recorder
    from tim_trace.tracer.weights import writer

    def broken(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.90 GiB.\nSee the documentation")

    Recorder.add_metrics = Recorder.save_tokenizer = Projection.distribution = broken
    trl_trainer.optimizer_statistics = trl_contract.scoring_contract = writer._copy = broken


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", choices=["grpo", "rloo", "derived", "copied", "other"], default="grpo")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--server", action="store_true", help="vLLM as a server in a process of its own")
    parser.add_argument("--bf16-engine", action="store_true")
    parser.add_argument("--moe", action="store_true", help="a mixture of experts")
    parser.add_argument("--lora", help="settings of peft's LoraConfig, as JSON")
    parser.add_argument("--experts", help="implementation of the experts")
    parser.add_argument("--config", default="{}", help="more settings of the trainer's config, as JSON")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="start so many processes of itself with torchrun")
    parser.add_argument("--transfer", choices=list(transfers.FAULTS), help="how the transfer to vLLM goes wrong")
    parser.add_argument("--evaluate", action="store_true", help="evaluate on four prompts after every step")
    parser.add_argument("--rollout-function", action="store_true")
    parser.add_argument("--pretend", metavar="VERSION")
    parser.add_argument("--without", metavar="FUNCTION")
    parser.add_argument("--break-recorder", action="store_true")
    parser.add_argument("--break-parts", action="store_true")
    parser.add_argument("--refuse-collectives", action="store_true", help="have collectives inside recording raise")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--trainings", type=int, default=1, help="how often train() is called")
    parser.add_argument("--die-after", type=int, metavar="STEP", help="kill -9 some seconds after this step")
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    if arguments.ranks > 1:
        tiny.save_model(arguments.model, moe=arguments.moe)
        options = ["--standalone", "--nproc-per-node", str(arguments.ranks)]
        rest = [argument for argument in sys.argv[1:] if argument != "--ranks"]
        rest.remove(str(arguments.ranks))
        torchrun = str(Path(sys.executable).parent / "torchrun")
        os.execv(torchrun, [torchrun, *options, __file__, *rest])
    if arguments.break_recorder:
        break_recorder()
    if arguments.break_parts:
        break_parts()
    if arguments.refuse_collectives:
        importlib.import_module("collectives").refuse_in_guards()
    if arguments.pretend:
        pretend(arguments.pretend, arguments.without)
    with ExitStack() as stack:
        train(arguments, stack)


def train(arguments, stack):
    if not arguments.vllm and not arguments.server:
        hide_vllm()
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    if "TORCHELASTIC_RUN_ID" not in os.environ and not arguments.resume:
        tiny.save_model(arguments.model, torch.bfloat16 if arguments.bf16_engine else torch.float32, arguments.moe)
    tokenizer = tiny.make_tokenizer()
    if arguments.vllm:
        tiny.keep_weights_reloadable()
        tiny.spare_compiler()
    engine = {"use_vllm": arguments.vllm, "vllm_mode": "colocate"}
    if arguments.server:
        servers.carry_weights_in_files(arguments.model)
        url = stack.enter_context(servers.server(arguments.model))
        engine = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 900}
    experts = {"experts_implementation": arguments.experts} if arguments.experts else {}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, **experts)
    prompts = [{"prompt": f"{a}+{b}{'=' * (1 + a % 3)}"} for a in range(10) for b in range(10)]
    config_class, trainer_class = {"rloo": (RLOOConfig, RLOOTrainer)}.get(arguments.trainer, (GRPOConfig, GRPOTrainer))
    if arguments.trainer in ("derived", "copied", "other"):
        trainer_class = getattr(importlib.import_module("trainers"), arguments.trainer)(trainer_class)
    settings = {
        "output_dir": arguments.model + "-out",
        "max_steps": arguments.steps,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        **engine,
        "vllm_max_model_length": 64,
        "vllm_gpu_memory_utilization": 0.3,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 0,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **({"eval_strategy": "steps", "eval_steps": 1} if arguments.evaluate else {}),
        **json.loads(arguments.config),
    }
    trainer = trainer_class(
        model=model,
        args=tiny.config_of(config_class, settings),
        reward_funcs=[digits, short],
        train_dataset=Dataset.from_list(prompts),
        eval_dataset=Dataset.from_list(prompts[:4]) if arguments.evaluate else None,
        processing_class=tokenizer,
        **({"rollout_func": sample_with_a_tool} if arguments.rollout_function else {}),
        **({"peft_config": lora(json.loads(arguments.lora))} if arguments.lora else {}),
    )
    if arguments.transfer:
        transfers.FAULTS[arguments.transfer](trainer)
    if arguments.die_after:
        trainer.add_callback(Dies(arguments.die_after))
    for _ in range(arguments.trainings):
        trainer.train(resume_from_checkpoint=arguments.resume or None)
    if trainer.is_world_process_zero():
        weights = tiny.weights_hash(trainer.accelerator.unwrap_model(trainer.model))
        tiny.finish(arguments.result, weights=weights, history=trainer.state.log_history)


if __name__ == "__main__":
    main()
