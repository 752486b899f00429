"""Compare a replay with a bare loop over the same model and batches."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from comparison import Comparison, in_turn, ratios
from tim_trace.replay.engine import replay
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

NUM_STEPS, BATCHES, ROWS, PROMPT, RESPONSE = 8, 4, 8, 32, 224
VOCAB = 8000
ROUNDS = 5


def compare():
    """Measure tokens per second of a prefill replay of 65,536 tokens on a small Qwen3, and of a bare loop."""
    import torch

    model, steps = small_model(), [_step(seed) for seed in range(NUM_STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "run")
        record_steps(trace, model, steps, PROMPT, ROWS)
        fresh = iter([copy_of(trace, number) for number in range(ROUNDS)])
        taken = in_turn(
            ROUNDS,
            replayed=lambda: replay(next(fresh)),
            bare=lambda: _loop(torch, model, steps),
        )
    yield Comparison(
        what="throughput over that of the bare loop, including reading and writing the trace",
        values=ratios(taken["bare"], taken["replayed"]),
        at_least=0.95,
    )


def small_model(**changes):
    """A Qwen3 with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "dtype": "float32",
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**sizes | changes)).eval()


def _step(seed):
    return list(np.random.default_rng(seed).integers(0, VOCAB, (BATCHES * ROWS, PROMPT + RESPONSE)))


def record_steps(trace, model, steps, prompt, rows, logprobs=None):
    """Record steps of token sequences, scored `rows` at a time in their order, padded on the right.

    `logprobs` has an array for each sequence of each step; without it, every logprob is -1.
    """
    with Recorder(trace) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        recorder.add_contract("train", {"engine": "a loop"})
        recorder.add_weights(0, model.state_dict())
        for number, sequences in enumerate(steps, 1):
            responses = [ids[prompt:] for ids in sequences]
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[ids[:prompt] for ids in sequences],
                response_ids=responses,
                policy_version=0,
            )
            scored = logprobs[number - 1] if logprobs else [np.full(len(ids), -1.0, np.float32) for ids in responses]
            recorder.add_scores("train", batch, logprobs=scored, forward=forward_of(responses, rows))


def forward_of(responses, rows):
    """Return how sequences go through a model: `rows` at a time, padded on the right."""
    number = np.arange(len(responses))
    lengths = np.array([len(ids) for ids in responses])
    widths = np.array([lengths[start : start + rows].max() for start in range(0, len(lengths), rows)])
    return Forward(
        ids=number // rows,
        places=(number % rows).astype("i4"),
        rows=np.full(len(responses), rows, np.int32),
        pad_left=np.zeros(len(responses), np.int32),
        pad_right=(widths[number // rows] - lengths).astype("i4"),
    )


def copy_of(trace, number):
    """Return a copy of the trace in its current state."""
    return shutil.copytree(trace, trace.with_name(f"copy-{number}"))


def _loop(torch, model, steps):
    """What a user would write: forward, log_softmax, gather."""
    for sequences in steps:
        for start in range(0, len(sequences), ROWS):
            ids_BW = torch.from_numpy(np.stack(sequences[start : start + ROWS]))
            with torch.no_grad():
                logits_BTV = model(ids_BW, logits_to_keep=RESPONSE + 1).logits[:, :-1]
                torch.log_softmax(logits_BTV, -1).gather(-1, ids_BW[:, PROMPT:, None])
