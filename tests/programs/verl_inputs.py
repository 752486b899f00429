"""What a run of verl needs beside verl: a tiny Qwen3 whose head has padding rows, prompts in verl's columns, a reward.

verl_inputs.py FOLDER [HEAD_ROWS]
"""

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
WORDS = [*SPECIAL, "\n", *"0123456789+= ", *"abcdefghijklmnopqr"]
"""35 words, those that verl looks for in a Qwen's tokenizer among them."""
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>"

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The share of characters that are digits."""
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
'''


def save_model(folder, head_rows):
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=SPECIAL[2:],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=head_rows, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def save_prompts(path):
    draw = random.Random(0)
    sums = [f"{draw.randrange(10 ** draw.randint(1, 4))}+{draw.randrange(100)}=" for _ in range(16)]
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"split": "train", "index": index},
        }
        for index, text in enumerate(sums)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", int(sys.argv[2]) if len(sys.argv) > 2 else 64)
    save_prompts(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)
