"""Tokens that nobody sampled, and that count all the same: a prompt's, a tool's."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..evidence import Evidence
from ..finding import Finding
from ..thresholds import (
    MIN_UNSAMPLED_RUN,
    MIN_UNSAMPLED_SEQUENCES,
    UNSAMPLED_NATS,
)


def find_unsampled(evidence: Evidence) -> list[Finding]:
    """Runs of tokens whose logprob lies far below minus the entropy, on both sides; this takes recorded entropies.

    Of sampled tokens logprob + entropy is 0 on average, and after an improbable token the entropy rises: improbable ones
    do not follow each other.
    """
    entropy = evidence.entropy
    if entropy is None:
        return []
    runs = unlikely_runs(np.maximum(evidence.a, evidence.b) + entropy, evidence.seq, evidence.position)
    rows = np.unique(evidence.seq[runs])
    present = len(np.unique(evidence.seq))
    if len(rows) < max(3, MIN_UNSAMPLED_SEQUENCES * present):
        return []
    likely = np.maximum(evidence.a, evidence.b)
    return [
        Finding(
            code="mask",
            evidence=f"in {len(rows):,} of {present:,} sequences runs of tokens, {runs.sum():,} in all, have "
            f"{likely[runs].mean():.3g} nats on average on both sides where their entropy is {entropy[runs].mean():.3g}: "
            "sampling does not draw these; they are a prompt's or a tool's, and count in the loss",
            effect=evidence.rms(runs),
            share=float(runs.mean()),
            weight=0.9,
            next=commands.row(evidence, int(rows[0])),
            numbers={"num_tokens": int(runs.sum()), "num_sequences": len(rows)},
        )
    ]


def unlikely_runs(calibration: np.ndarray, seq: np.ndarray, position: np.ndarray) -> np.ndarray:
    """[K] bool: neighbouring tokens, MIN_UNSAMPLED_RUN at least, of which each has logprob + entropy below UNSAMPLED_NATS."""
    order = np.lexsort((position, seq))
    low, row = (calibration < UNSAMPLED_NATS)[order], seq[order]
    begins = np.concatenate([[True], (row[1:] != row[:-1]) | (low[1:] != low[:-1])]) if len(low) else np.empty(0, bool)
    run = np.cumsum(begins) - 1
    out = np.zeros(len(low), bool)
    out[order] = low & (np.bincount(run)[run] >= MIN_UNSAMPLED_RUN)
    return out
