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
        keys = evidence.sample.token_keys[evidence.keep][telling]
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
