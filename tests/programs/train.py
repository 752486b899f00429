"""Train a tiny model with TRL, as a user's script would: it knows nothing of tim-trace."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


def digits(prompts, completions, **kwargs):
    return [sum(character.isdigit() for character in completion) / 6 for completion in completions]


def short(prompts, completions, **kwargs):
    return [-0.1 * len(completion) for completion in completions]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", choices=["grpo", "rloo"], default="grpo")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--bf16-engine", action="store_true")
    parser.add_argument("--config", default="{}", help="more settings of the trainer's config, as JSON")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()

    import json

    tokenizer = tiny.save_model(arguments.model, torch.bfloat16 if arguments.bf16_engine else torch.float32)
    if arguments.vllm:
        tiny.keep_weights_reloadable()
    model = Qwen3ForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    prompts = [{"prompt": f"{a}+{b}{'=' * (1 + a % 3)}"} for a in range(10) for b in range(10)]
    config_class, trainer_class = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[
        arguments.trainer
    ]
    settings = {
        "output_dir": arguments.model + "-out",
        "max_steps": arguments.steps,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "use_vllm": arguments.vllm,
        "vllm_mode": "colocate",
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
        **json.loads(arguments.config),
    }
    trainer = trainer_class(
        model=model,
        args=config_class(**settings),
        reward_funcs=[digits, short],
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        history = [row for row in trainer.state.log_history]
        tiny.finish(arguments.result, weights=tiny.weights_hash(trainer.model), history=history)


if __name__ == "__main__":
    main()
