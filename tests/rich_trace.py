"""A trace that has all that a query can ask for, and its tokens as NumPy columns."""

import numpy as np
import pytest
import torch
from tim_trace.analysis.query import sql
from tim_trace.tracer.dense import Logits
from tim_trace.tracer.recorder import Recorder

ROWS = 40
CAPTURED = list(range(0, ROWS, 2))
VOCAB = 9


def make_rich_trace(path):
    """Two steps of 40 responses of up to 64 tokens, some masked, one NaN, one -inf, one far off; two prompts a step.

    With rewards, advantages, entropies, top-2 gaps, two inner iterations of `current`, and distributions of every other row.
    """
    draw = np.random.default_rng(7)
    with Recorder(path) as recorder:
        for step in (1, 2):
            lengths = draw.integers(1, 65, ROWS)
            rollout = [-draw.exponential(1.0, n).astype(np.float32) for n in lengths]
            train = [_near(draw, r, -0.02, 0.1) for r in rollout]
            train[0][0], rollout[1][0], train[2][0] = np.nan, -np.inf, -25.0
            batch = recorder.add_sequences(
                step=step,
                prompt_ids=[[1]] * ROWS,
                response_ids=[draw.integers(0, VOCAB, n).tolist() for n in lengths],
                response_mask=[(draw.random(n) > 0.2).tolist() for n in lengths],
                group_ids=[str(row % 2) for row in range(ROWS)],
                advantage=draw.normal(size=ROWS),
                reward=draw.random(ROWS),
            )
            tokens = sum(lengths[row] for row in CAPTURED)
            logits = torch.from_numpy(draw.normal(0, 2, (tokens, VOCAB))).float()
            moved = logits + torch.from_numpy(draw.normal(0, 0.02, (tokens, VOCAB))).float()
            entropy, gap = ([draw.exponential(scale, n).astype(np.float32) for n in lengths] for scale in (1.0, 0.5))
            recorder.add_scores(
                "rollout", batch, logprobs=rollout, entropy=entropy, top2_gap=gap,
                distribution=Logits(logits=logits), captured_rows=CAPTURED,
            )  # fmt: skip
            recorder.add_scores(
                "train", batch, logprobs=train, distribution=Logits(logits=moved), captured_rows=CAPTURED
            )
            for scale in (0.05, 0.3):
                recorder.add_scores("current", batch, logprobs=[_near(draw, t, 0.0, scale) for t in train])
    return path


def _near(draw, logprobs, mean, spread):
    return np.minimum(logprobs + draw.normal(mean, spread, len(logprobs)).astype(np.float32), 0)


def tokens_of(trace, source="pair('train', 'rollout')", where="mask AND isfinite(d)"):
    """Columns of the tokens that count and are finite on both sides, in order, with the number of their sequence."""
    found = sql(trace, f"FROM {source} WHERE {where} ORDER BY step, seq_id, position")
    columns = {name: np.array([row[i] for row in found.rows]) for i, name in enumerate(found.columns)}
    names = [f"{s}/{q}" for s, q in zip(columns["step"], columns["seq_id"], strict=True)]
    columns["sequence"] = np.unique(names, return_inverse=True)[1]
    if "d" in columns:
        columns["k3"] = np.expm1(columns["d"]) - columns["d"]
    return columns


def of(tokens, **values):
    """The tokens whose columns have these values."""
    inside = np.all([tokens[name] == value for name, value in values.items()], axis=0)
    return {name: column[inside] for name, column in tokens.items()}


def of_step(tokens, step):
    return of(tokens, step=step)


def of_sequences(tokens):
    """The tokens of each sequence, in order."""
    return [of(tokens, sequence=number) for number in np.unique(tokens["sequence"])]


def by_sequence(tokens, values):
    return np.array([values[tokens["sequence"] == number].sum() for number in np.unique(tokens["sequence"])])


def close(found, expected):
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
