"""Record a step of a Gemma 2 whose attention omits its soft cap, as transformers' sdpa does.

python benchmarks/location/softcap.py -o runs/gemma2
tim-trace locate runs/gemma2 --against attention=eager
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from recording import drawn, recorded, rows
from transformers import Gemma2Config

NUM_ROWS, VOCAB = 12, 500


def initialise(model):
    """Draw weights with scores that a cap of 20 changes."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", required=True)
    config = Gemma2Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=VOCAB, sliding_window=32, attn_logit_softcapping=20.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    model = drawn("transformers.models.gemma2.modeling_gemma2.Gemma2ForCausalLM", config.to_dict(), initialise)
    prompts, responses = rows(VOCAB, NUM_ROWS, (5, 21)), rows(VOCAB, NUM_ROWS, (25, 41), seed=1)
    recorded(parser.parse_args().output, model, prompts, responses, 3)


if __name__ == "__main__":
    main()
