"""Train a tiny model with TRL that calls a tool, as a user's script would: it knows nothing of tim-trace."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch
import train as training
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
CALL_OR_NUMBER = (
    '(<tool_call>\\n\\{"name": "add", "arguments": \\{"a": [0-9], "b": [0-9]\\}\\}\\n</tool_call>|[0-9]{2,6})'
)


def make_tokenizer():
    from trl.chat_template_utils import qwen3_chat_template

    words = [*SPECIAL, *TAGS, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    made.chat_template = qwen3_chat_template
    return made


def save_model(folder):
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    shape = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


class Sums:
    """An environment whose method is a tool."""

    def reset(self, **kwargs):
        self.total = 0

    def add(self, a: int, b: int) -> int:
        """
        Adds two numbers to the total.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The total.
        """
        self.total += a + b
        return self.total


def varied(prompts, completions, **kwargs):
    return [sum(len(message.get("content") or "") for message in messages) % 7 for messages in completions]


def call_now_and_then(trainer, tokenizer):
    """Make every second response a call, and the others short: a model of random weights calls no tool."""
    own, call = trainer._generate_single_turn, tokenizer(CALL)["input_ids"]

    def turn(prompt_ids, *args, **kwargs):
        sampled, logprobs = own(prompt_ids, *args, **kwargs)
        is_first = len(sampled) == trainer.args.per_device_train_batch_size
        return [call if is_first and row % 2 else ids[:9] for row, ids in enumerate(sampled)], logprobs

    trainer._generate_single_turn = turn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--environment", action="store_true")
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    if arguments.vllm:
        tiny.keep_weights_reloadable()
        tiny.spare_compiler()
    else:
        training.hide_vllm()
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = save_model(arguments.model)
    prompts = [{"prompt": [{"role": "user", "content": f"{a}+{b}"}]} for a in range(10) for b in range(10)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        args=GRPOConfig(
            output_dir=arguments.model + "-out",
            max_steps=2,
            learning_rate=1e-3,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=128,
            max_tool_calling_iterations=2,
            use_vllm=arguments.vllm,
            vllm_mode="colocate",
            vllm_max_model_length=900,
            vllm_gpu_memory_utilization=0.3,
            vllm_structured_outputs_regex=CALL_OR_NUMBER if arguments.vllm else None,
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            seed=0,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        reward_funcs=[varied],
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        **({"environment_factory": Sums} if arguments.environment else {"tools": [add]}),
    )
    if not arguments.vllm:
        call_now_and_then(trainer, tokenizer)
    trainer.train()
    weights = tiny.weights_hash(trainer.accelerator.unwrap_model(trainer.model))
    tiny.finish(arguments.result, weights=weights, history=trainer.state.log_history)


if __name__ == "__main__":
    main()
