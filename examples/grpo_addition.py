"""Teach a tiny Qwen3 with random weights to add numbers, using TRL's GRPOTrainer and vLLM rollouts in one process.

    python examples/grpo_addition.py              # sample with vLLM
    python examples/grpo_addition.py --no-vllm    # sample with transformers
    python examples/grpo_addition.py --coarse-from 121    # round vLLM's weights to 2 bits, so that the reward drops

Nothing is downloaded: the script creates the model and the tokenizer. The trainer computes in float32 and vLLM in
bfloat16, which causes a mismatch to study.
"""

import argparse
import os
import random

# Give vLLM a small cache on a CPU, and run its engine in this process.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

LARGEST = 4
"""Largest number in the prompts. The smallest is 0."""


def make_model(folder):
    """Save a model with random weights and a character-level tokenizer, and return the tokenizer."""
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def right_sum(prompts, completions, **kwargs):
    """Return one reward per completion: 1 for the correct sum, up to 0.5 for a number close to it, otherwise 0."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted = sum(int(number) for number in prompt.removesuffix("=").split("+"))
        answer = completion.strip()
        if not (answer.isdigit() and len(answer) <= 2):
            rewards.append(0.0)
        elif answer == str(wanted):
            rewards.append(1.0)
        else:
            rewards.append(0.5 * max(0.0, 1 - abs(int(answer) - wanted) / 8))
    return rewards


def let_weights_change():
    """Keep vLLM's linear layers unpacked on a CPU.

    By default, vLLM 0.32 packs linear weights for its CPU kernels and drops the originals, so TRL cannot load new
    weights.
    """
    from vllm.model_executor.layers import utils

    def keep_plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_plain


def coarsen_engine(trainer, first_step):
    """From `first_step` on, round each weight sent to vLLM to -s, 0 or s, where s is its matrix's largest |weight|."""
    synced_weights = trainer.vllm_generation._iter_named_params

    def coarse_weights():
        for name, weight in synced_weights():
            if trainer.state.global_step + 1 >= first_step and name.endswith("_proj.weight"):
                scale = weight.abs().max()
                weight = (weight / scale).round() * scale
            yield name, weight

    trainer.vllm_generation._iter_named_params = coarse_weights


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--no-vllm", action="store_true", help="sample with transformers instead of vLLM")
    engine.add_argument(
        "--coarse-from", type=int, metavar="STEP", help="round vLLM's weights to 2 bits from this step on"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="runs/tiny-qwen3", help="folder for the generated model")
    arguments = parser.parse_args()

    tokenizer = make_model(arguments.model)
    on_cpu = not torch.cuda.is_available()
    if on_cpu and not arguments.no_vllm:
        let_weights_change()

    draw = random.Random(0)
    prompts = [f"{draw.randint(0, LARGEST)}+{draw.randint(0, LARGEST)}=" for _ in range(4096)]
    trainer = GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=right_sum,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        args=GRPOConfig(
            output_dir=f"{arguments.model}-trained",
            max_steps=arguments.steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            per_device_train_batch_size=128,
            num_generations=16,
            max_completion_length=4,
            use_vllm=not arguments.no_vllm,
            vllm_mode="colocate",
            vllm_max_model_length=64,
            vllm_gpu_memory_utilization=0.3,
            use_cpu=on_cpu,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
    )
    if arguments.coarse_from:
        coarsen_engine(trainer, arguments.coarse_from)
    trainer.train()

    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    print(f"mean reward: {first:.2f} in the first {tenth} log entries, {last:.2f} in the last {tenth}")


if __name__ == "__main__":
    main()
