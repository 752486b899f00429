"""Contexts that come again: the same prompt, the same response up to a token, and the same token, at several steps.

What each side thinks of a context changes with its weights alone, so contexts tell whose weights moved and when.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..evidence import Evidence
from ..thresholds import MIN_REST


@dataclass(frozen=True, slots=True)
class Contexts:
    """Mean logprobs of C contexts at each of K steps, NaN where a step does not have the context."""

    steps: np.ndarray
    """[K]"""
    a: np.ndarray
    """[K, C] nats"""
    b: np.ndarray
    """[K, C] nats"""

    @classmethod
    def of(cls, evidence: Evidence) -> Contexts:
        """The contexts that at least two steps have, of tokens that are not certain."""
        telling = evidence.rest > MIN_REST
        keys = token_keys(evidence)[evidence.keep][telling]
        steps, step = np.unique(evidence.sample.steps[evidence.seq[telling]], return_inverse=True)
        _, context = np.unique(keys, return_inverse=True)
        num = int(context.max(initial=-1)) + 1
        flat = step * num + context
        count = np.bincount(flat, minlength=len(steps) * num)
        tables = []
        for values in (evidence.a[telling], evidence.b[telling]):
            with np.errstate(invalid="ignore", divide="ignore"):
                means = np.bincount(flat, values, minlength=len(count)) / count
            tables.append(means.reshape(len(steps), num))
        again = np.isfinite(tables[0]).sum(axis=0) >= 2
        return cls(steps, tables[0][:, again], tables[1][:, again])

    @property
    def num(self) -> int:
        """Contexts that come again."""
        return int(self.a.shape[1])


def prefix_keys(evidence: Evidence) -> np.ndarray:
    """[N] a number for the prompt and the response before each token; equal for equal ones."""
    return _rolled(evidence)[0]


def token_keys(evidence: Evidence) -> np.ndarray:
    """[N] a number for the prompt and the response up to and with each token; equal for equal ones."""
    return _rolled(evidence)[1]


def _rolled(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    sample = evidence.sample
    starts = [hash((0, row)) if prompt is None else hash(tuple(prompt)) for row, prompt in enumerate(sample.prompts)]
    state = np.array(starts, np.int64).astype(np.uint64)
    before, after = np.empty(len(sample.tokens), np.uint64), np.empty(len(sample.tokens), np.uint64)
    factor, more, shift = np.uint64(6364136223846793005), np.uint64(1442695040888963407), np.uint64(29)
    ids = sample.tokens.astype(np.uint64)
    for t in range(int(sample.lengths.max(initial=0))):
        rows = np.flatnonzero(sample.lengths > t)
        at = sample.starts[rows] + t
        before[at] = state[rows]
        mixed = (state[rows] ^ (ids[at] + np.uint64(1))) * factor + more
        state[rows] = mixed ^ (mixed >> shift)
        after[at] = state[rows]
    return before, after
