"""The size of a mismatch over the bins of one axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..statistics.estimators import Array

NUM_SUMS = 4
"""Sums that a profile is made of: tokens, |d|, d squared, d."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the tokens of each of B bins have, d in nats; NaN where a bin has no token."""

    num: np.ndarray
    """[B] int64, tokens."""
    mean_abs_d: Array
    """[B] mean of |d|, nats."""
    rms_d: Array
    """[B] root of the mean of d squared, nats."""
    mean_d: Array
    """[B] mean of d, nats."""


def profile_of(sums_BQ: Array) -> Profile:
    """From [B, 4] sums over the tokens of each bin: how many, |d|, d squared, d."""
    num_B = sums_BQ[:, 0]
    with np.errstate(invalid="ignore"):
        mean_BQ = sums_BQ[:, 1:] / np.where(num_B > 0, num_B, np.nan)[:, None]
    return Profile(
        num=num_B.astype(np.int64), mean_abs_d=mean_BQ[:, 0], rms_d=np.sqrt(mean_BQ[:, 1]), mean_d=mean_BQ[:, 2]
    )
