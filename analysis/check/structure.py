"""Parts of a run that show where a mismatch comes from: repeated contexts, the first step, rows that agree, sampled tokens.

Shapes: K kept tokens in S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .pair_data import PairData, once
from .rounding import allowed_noise, logit_error

MIN_REPEATS = 20
"""Minimum number of repeated tokens, i.e. the same token after the same prefix in the same step, to judge whether a
side is deterministic.
"""


@dataclass(frozen=True, slots=True)
class RepeatedTokens:
    """Differences between a side's values for the same token after the same prefix within a step."""

    num: int
    """Number of repeated tokens."""
    a: float
    """Rms difference of pass a, as an error of the logit, nats."""
    b: float
    """Rms difference of pass b, as an error of the logit, nats."""
    d: float
    """Rms of d at these tokens, as an error of the logit, nats."""

    @property
    def is_known(self) -> bool:
        """True if there are enough repeated tokens to compare."""
        return self.num >= MIN_REPEATS


@once
def repeats(data: PairData) -> RepeatedTokens:
    """Compare each token with the one before it that has the same prefix and id in the same step."""
    keys, steps = data.sample.token_keys[data.keep], data.sample.steps[data.seq]
    order = np.lexsort((data.seq, keys, steps))
    one, two = order[:-1], order[1:]
    twin = (keys[one] == keys[two]) & (steps[one] == steps[two]) & (data.rest[one] > 0.05)
    one, two = one[twin], two[twin]
    if len(one) < MIN_REPEATS:
        return RepeatedTokens(len(one), 0.0, 0.0, 0.0)
    scale = data.scale[one]

    def rms(values: np.ndarray) -> float:
        return float(np.sqrt(np.mean((values / scale) ** 2) / 2))

    d = float(np.sqrt(np.mean((data.d[one] / scale) ** 2)))
    return RepeatedTokens(len(one), rms(data.a[one] - data.a[two]), rms(data.b[one] - data.b[two]), d)


def not_repeatable(data: PairData) -> str | None:
    """Return the non-deterministic side, `a` or `b`, if that accounts for the mismatch; None otherwise."""
    found = repeats(data)
    if not found.is_known:
        return None
    for side, own, other in (("a", found.a, found.b), ("b", found.b, found.a)):
        if own > allowed_noise(data) / 2 and own > 3 * other and own > found.d / 3:
            return side
    return None


@dataclass(frozen=True, slots=True)
class MismatchGrowth:
    """Size of the mismatch at the first step compared with later ones."""

    first: float
    """Median logit error at the first step, nats."""
    later: float
    """Largest median logit error of a later step, nats."""
    since: int | None
    """First step after which the error is above the midpoint between `first` and `later`, in logarithms."""

    @property
    def ratio(self) -> float:
        return self.later / max(self.first, 1e-9)


@once
def growth(data: PairData) -> MismatchGrowth:
    """Return how the mismatch grows over the steps."""
    noise = logit_error(data)
    steps = data.sample.steps[data.seq]
    known = np.unique(steps)
    level = np.array([np.median(noise[steps == step]) for step in known])
    if len(known) < 2:
        return MismatchGrowth(float(level[0]) if len(level) else 0.0, 0.0, None)
    middle = np.sqrt(max(level[0], 1e-9) * max(level[1:].max(), 1e-9))
    above = np.flatnonzero(level > middle)
    return MismatchGrowth(float(level[0]), float(level[1:].max()), int(known[above[0]]) if len(above) else None)


@once
def exact_rows(data: PairData) -> tuple[float, np.ndarray]:
    """Return the share of sequences at the level of rounding, and the other sequences, if the sequences fall into two
    kinds: the others must have at least five times the mismatch, and more than an eighth of what rounding allows.
    Otherwise return 0 and no sequences.
    """
    noise = logit_error(data)
    order = np.lexsort((noise, data.seq))
    rows, starts, num = np.unique(data.seq[order], return_index=True, return_counts=True)
    middle, rows = noise[order][starts + num // 2][num >= 4], rows[num >= 4]
    order = np.argsort(middle, kind="stable")
    middle, rows = middle[order], rows[order]
    if len(middle) < 20:
        return 0.0, rows[:0]
    logs = np.log(middle + 1e-6)
    first = np.arange(1, len(logs))
    sums = np.cumsum(logs - logs.mean())[:-1]
    between = sums**2 * (1 / first + 1 / (len(logs) - first))
    at = int(np.argmax(between)) + 1
    low, high = float(np.median(middle[:at])), float(np.median(middle[at:]))
    is_parted = between.max() > 0.6 * float(np.sum((logs - logs.mean()) ** 2)) and high > 5 * low
    if not is_parted or high < allowed_noise(data) / 8 or low > allowed_noise(data) / 2:
        return 0.0, rows[:0]
    return at / len(middle), rows[at:]


def sampled_score(data: PairData, side: str) -> float:
    """Return the mean of logprob + entropy of a side in standard errors over sequences: near 0 if the tokens were sampled
    from that side's distribution. 0 if the side has no entropies."""
    entropy = getattr(data.sample, side).entropy
    if entropy is None:
        return 0.0
    values = getattr(data, side) + entropy[data.keep]
    there = np.isfinite(values)
    if there.sum() < 30:
        return 0.0
    total = np.bincount(data.seq[there], values[there], minlength=data.sample.num_sequences)
    error = np.sqrt(np.sum(total**2))
    return float(total.sum() / max(error, 1e-9))


def sampled_mean(data: PairData, side: str) -> float:
    """Return the mean of logprob + entropy of a side, nats; NaN if it has no entropies."""
    entropy = getattr(data.sample, side).entropy
    return float("nan") if entropy is None else float(np.nanmean(getattr(data, side) + entropy[data.keep]))
