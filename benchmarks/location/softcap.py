"""Record a step of a Gemma 2 whose attention drops its soft cap: transformers' sdpa does.

python benchmarks/location/softcap.py -o runs/gemma2
tim-trace locate runs/gemma2 --against attention=eager
"""

import argparse

import torch
from score import recorded
from transformers import Gemma2Config

NUM_ROWS = 12


def initialise(model, seed):
    """Random weights with scores that a cap of 20 changes."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", required=True)
    config = Gemma2Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=500, sliding_window=32, attn_logit_softcapping=20.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    made = config.to_dict() | {"class": "transformers.models.gemma2.modeling_gemma2.Gemma2ForCausalLM"}
    recorded(parser.parse_args().output, made, initialise, seed=0, num_rows=NUM_ROWS)


if __name__ == "__main__":
    main()
