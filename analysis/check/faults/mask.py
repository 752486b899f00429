"""Tokens that count in the loss although they come from a prompt or a tool and were not sampled."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Fault
from ..hypothesis import Hypothesis
from ..pair_data import PairData

UNSAMPLED_NATS = -3.0
"""logprob + entropy, nats, below which a token counts as unlikely. With a flat-tailed model, 5 % of sampled tokens are
below it."""
MIN_UNSAMPLED_RUN = 4
"""Minimum number of consecutive unlikely tokens that suggests they were not sampled. In healthy runs, fewer than 2 % of the
sequences contain as many."""

MASK = Fault(
    code="mask",
    title="prompt or tool tokens are counted as sampled tokens",
    broken="recording",
    evidence={
        "unlikely_runs": "in {num_sequences:,} of {of_sequences:,} sequences, runs of consecutive tokens "
        "({num_tokens:,} in all) have a mean logprob of {mean_logprob:.3g} nats on both sides and a mean entropy of "
        "{mean_entropy:.3g}: they were not sampled but come from a prompt or a tool, and they count in the loss"
    },
)


def find_unsampled(data: PairData) -> list[Hypothesis]:
    """Detect runs of tokens whose logprob is far below the negative entropy in both passes. Needs recorded entropies.

    For sampled tokens, logprob + entropy is 0 on average. After an improbable token the entropy rises, so improbable
    tokens rarely follow one another.
    """
    entropy = data.entropy
    if entropy is None:
        return []
    runs = unlikely_runs(np.maximum(data.a, data.b) + entropy, data.seq, data.position)
    rows = np.unique(data.seq[runs])
    present = len(np.unique(data.seq))
    if len(rows) < max(4, 0.05 * present):
        return []
    likely = np.maximum(data.a, data.b)
    finding = MASK.finding(
        data,
        "unlikely_runs",
        runs,
        weight=0.9,
        next=commands.row(data, int(rows[0])),
        numbers={
            "num_tokens": int(runs.sum()),
            "num_sequences": len(rows),
            "of_sequences": present,
            "mean_logprob": float(likely[runs].mean()),
            "mean_entropy": float(entropy[runs].mean()),
        },
    )
    return [Hypothesis(finding=finding, tokens=data.marked(runs), gain=float("inf"))]


def unlikely_runs(calibration: np.ndarray, seq: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return [K] bool: True in runs of at least MIN_UNSAMPLED_RUN consecutive tokens with `calibration`, i.e. logprob +
    entropy, below UNSAMPLED_NATS."""
    order = np.lexsort((position, seq))
    low, row = (calibration < UNSAMPLED_NATS)[order], seq[order]
    begins = np.concatenate([[True], (row[1:] != row[:-1]) | (low[1:] != low[:-1])]) if len(low) else np.empty(0, bool)
    run = np.cumsum(begins) - 1
    out = np.zeros(len(low), bool)
    out[order] = low & (np.bincount(run)[run] >= MIN_UNSAMPLED_RUN)
    return out
