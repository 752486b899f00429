"""Recorded loops over tiny models: several groups of a prompt a step, responses of many lengths, batches that mix groups."""

from types import SimpleNamespace

import numpy as np
import torch
from tim_trace.tracer.hooks.trl_contract import model_identity
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

VOCAB = 40


def tiny_model(**changes):
    """A Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "dtype": "float32",
    }  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**sizes | changes)).eval()


def record_groups(
    path,
    model=None,
    *,
    steps=3,
    groups=6,
    size=4,
    rows=4,
    version=lambda step: 0,
    name=lambda step, place: f"s{step}-{place}",
):
    """Record steps of groups of responses, scored `rows` at a time in a random order; logprobs are of a uniform policy."""
    model = model or tiny_model()
    draw = np.random.default_rng(0)
    with Recorder(path) as recorder:
        trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model))
        recorder.describe(model=model_identity(trainer))
        experts = {"model": {"experts": "grouped_mm"}} if hasattr(model.config, "num_experts") else {}
        recorder.add_contract("train", {"engine": "a loop"} | experts)
        for number in sorted({version(step) for step in range(steps)}):
            recorder.add_weights(number, {key: value + number * 1e-3 for key, value in model.state_dict().items()})
        for step in range(steps):
            prompts = [draw.integers(0, VOCAB, draw.integers(3, 20)) for _ in range(groups)]
            order = draw.permutation(groups * size)
            responses = [draw.integers(0, VOCAB, length) for length in draw.integers(1, 24, groups * size)]
            batch = recorder.add_sequences(
                step=step,
                prompt_ids=[prompts[place // size] for place in order],
                response_ids=responses,
                seq_ids=[name(step, place) for place in order],
                group_ids=[f"g{place // size}" for place in order],
                policy_version=version(step),
            )
            logprobs = [np.full(len(ids), -np.log(VOCAB), np.float32) for ids in responses]
            recorder.add_scores("train", batch, logprobs=logprobs, forward=_forward(len(order), rows))
    return path


def _forward(number, rows):
    place = np.arange(number)
    none = np.zeros(number, np.int32)
    return Forward(
        ids=place // rows,
        places=(place % rows).astype("i4"),
        rows=np.full(number, rows, np.int32),
        pad_left=none,
        pad_right=none,
    )
