"""Detect tokens that count in the loss although they come from a prompt or a tool and were not sampled."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import (
    MIN_UNSAMPLED_RUN,
    MIN_UNSAMPLED_SEQUENCES,
    UNSAMPLED_NATS,
)


def find_unsampled(data: PairData) -> list[Finding]:
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
    if len(rows) < max(3, MIN_UNSAMPLED_SEQUENCES * present):
        return []
    likely = np.maximum(data.a, data.b)
    return [
        data.finding(
            "mask",
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
    ]


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
