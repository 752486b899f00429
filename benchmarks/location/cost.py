"""Measure the cost of `tim-trace locate`, in forward passes of the same sequences, and its memory.

python benchmarks/location/cost.py [--rows 8] [--tokens 512] [--layers 30] [--rounds 3]

The model has the sizes of SmolLM2-135M and random weights; the script records a step. It alternates between the forward
of all rows in float32 by transformers, two rows at a time, including logits, and `locate` without patches between two
attention kernels in float32, and measures CPU time.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from recording import recorded, rows
from tim_trace.replay.locate.engine import locate
from transformers import LlamaForCausalLM

PROMPT, ROWS_A_FORWARD = 128, 2
CONFIG = {
    "hidden_size": 576, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def spent(run):
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 8), ("tokens", 512), ("layers", 30), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    config = CONFIG | {"num_hidden_layers": asked.layers}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaForCausalLM.config_class.from_dict(config)).eval()
        tokens = rows(CONFIG["vocab_size"], asked.rows, (asked.tokens, asked.tokens + 1))
        prompts, responses = zip(*((row[:PROMPT], row[PROMPT:]) for row in tokens), strict=True)
        trace = recorded(Path(folder, "run"), model, prompts, responses, ROWS_A_FORWARD)
        ids = torch.randint(5, CONFIG["vocab_size"], (asked.rows, asked.tokens))

        @torch.no_grad()
        def forward():
            for part in ids.split(ROWS_A_FORWARD):
                model(input_ids=part)

        def located():
            return locate(
                trace,
                arm="dtype=fp32",
                against="dtype=fp32,attention=eager",
                patch="none",
                sequences=f"random:{asked.rows}",
            )

        forward()
        ratios = []
        for _ in range(asked.rounds):
            one, _ = spent(forward)
            whole, found = spent(located)
            ratios.append(whole / one)
            share = sum(sum(own.values()) for own in found.products.values()) / sum(
                each.sum_square for each in found.sequences
            )
            print(
                f"forward {one:.1f} s, locate {whole:.1f} s, {whole / one:.1f} forwards; carried {share:.6f}",
                flush=True,
            )
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"median {np.median(ratios):.1f} forwards ({min(ratios):.1f} to {max(ratios):.1f}); {most:.1f} GB at most")


if __name__ == "__main__":
    main()
