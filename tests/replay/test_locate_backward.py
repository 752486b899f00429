"""Where gradients part: a planted fault of a backward is named where it lies, and rounding is taken for nothing else."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from tim_trace.analysis.locate_backward import locate_backward as find
from tim_trace.analysis.locate_backward_text import backward_sentence, backward_text
from tim_trace.replay.locate.backward import locate_backward
from tim_trace.schemas.errors import CannotReplay, InvalidOption
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

VOCAB, ROWS = 60, 6
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12}),
    "gpt_neox": ("GPTNeoX", {"eos_token_id": 1}),
}


def model_of(name):
    prefix, changes = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | changes), attn_implementation="eager")
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def record(folder, model, *, advantages=True, checkpoints=False):
    """A step of six sequences in forwards of three, padded on the right, with a clipped loss."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(2, VOCAB, 4) for _ in range(ROWS)]
    responses = [draw.integers(2, VOCAB, length) for length in draw.integers(8, 15, ROWS)]
    number = np.arange(ROWS)
    lengths = np.array([len(ids) for ids in responses])
    most = np.array([lengths[place - place % 3 : place - place % 3 + 3].max() for place in number])
    with Recorder(folder) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        contract = {"engine": "a loop", "model": {"dtypes": {"float32": 1}, "attention": "eager"}}
        recorder.add_contract("train", contract | {"training_mode": True, "gradient_checkpointing": checkpoints})
        recorder.add_loss(Loss(denominator="current"))
        recorder.add_weights(0, model.state_dict())
        batch = recorder.add_sequences(
            step=1, prompt_ids=prompts, response_ids=responses, policy_version=0, group_ids=[f"g{n}" for n in number],
            seq_ids=[f"s{n}" for n in number], advantage=draw.normal(size=ROWS).astype("f4") if advantages else None,
        )  # fmt: skip
        forward = Forward(
            ids=number // 3, places=(number % 3).astype("i4"), rows=np.full(ROWS, 3, np.int32),
            pad_left=np.zeros(ROWS, "i4"), pad_right=(most - lengths).astype("i4"),
        )  # fmt: skip
        recorder.add_scores(
            "train", batch, logprobs=[np.full(len(ids), -1.0, np.float32) for ids in responses], forward=forward
        )
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    made = {}

    def trace(name, **options):
        key = name, *options.items()
        if key not in made:
            made[key] = record(tmp_path_factory.mktemp(name) / "run", model_of(name), **options)
        return made[key]

    return trace


@pytest.mark.parametrize("against", ["dtype=fp64", "dtype=bf16", "attention=sdpa", "batch-size=1", "batch-size=6"])
@pytest.mark.parametrize("name", list(MODELS))
def test_rounding_is_no_fault_of_a_backward(traces, name, against):
    found = locate_backward(traces(name), against=against, sequences="random:6")
    worst = max(found.operators, key=lambda each: each.ratio)
    assert found.first is None, found.first
    assert 0 < worst.ratio < 1
    assert found.norm_a > 0
    assert sum(each.share for each in found.parameters) == pytest.approx(1)
