"""What other people's dumps write where there is no logprob, turned into "not recorded"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ragged import Ragged

CLAMPED = -9999.0
"""What some frameworks write for a logprob that they do not have."""


@dataclass(slots=True, kw_only=True)
class Placeholders:
    """How many values were taken for placeholders and became NULL, by kind."""

    clamped: int = 0
    """Values of -9999."""
    masked_zeros: int = 0
    """Values of 0.0 where the token does not count in the loss."""
    all_zero: int = 0
    """Values in lists of two or more that hold nothing but 0.0."""

    @property
    def total(self) -> int:
        return self.clamped + self.masked_zeros + self.all_zero

    def clean(self, logprobs: Ragged, mask: Ragged | None) -> Ragged:
        """Mark placeholders as not recorded and count them."""
        values = logprobs.values
        valid = np.ones(len(values), bool) if logprobs.valid is None else logprobs.valid.copy()
        clamped = valid & (values == CLAMPED)
        zeros = valid & (values == 0.0)
        all_zero = zeros & np.repeat(_only_zeros(logprobs, zeros), logprobs.lengths)
        masked = zeros & ~all_zero & (np.zeros(len(values), bool) if mask is None else ~mask.values)
        self.clamped += int(clamped.sum())
        self.all_zero += int(all_zero.sum())
        self.masked_zeros += int(masked.sum())
        valid &= ~(clamped | all_zero | masked)
        return logprobs if valid.all() else Ragged(values, logprobs.lengths, valid)


def _only_zeros(logprobs: Ragged, zeros: np.ndarray) -> np.ndarray:
    """[B] whether a list of two or more values is all zeros."""
    counts = np.concatenate([[0], np.cumsum(zeros)])
    ends = np.cumsum(logprobs.lengths)
    found = counts[ends] - counts[ends - logprobs.lengths]
    return np.asarray((found == logprobs.lengths) & (logprobs.lengths >= 2))
