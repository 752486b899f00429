"""Responses sampled before and after a step that get another value since: a reward, or a reference's logprob."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..statement import Measured
from . import thresholds as t
from .relations import correlation, length_correlation
from .rollouts import FEWEST_SPANNING, Rollouts, comparable, successive

_INTERVAL = 1.92
"""Logarithm of a likelihood ratio that bounds a 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedResponses:
    """Responses that came before a step and after it, and what they are given since: a reward, or a reference's logprob."""

    step: int
    """The first step with other values."""
    num_responses: int
    share: float
    """Of them that are given something else since."""
    share_before: float
    """Of the responses that came twice before `first`, those that were given something else then; NaN without any."""
    length_correlation: float
    """Of the differences and the lengths of the responses, over all or within steps; 0 where one of them has no spread."""
    is_of_one_length: bool
    """Whether those that are given something else have one length, so that nothing can be said of lengths."""
    agreement: float = 0.0
    """Correlation of what the responses were given before the step and since; 0 where one of them has no spread."""
    low: int = 0
    """The first step of the 95 % interval of the change."""
    high: int = 0
    """The last one."""

    is_earlier: bool = False
    """Whether it came long before the fall that is looked at."""

    @property
    def is_rescaled(self) -> bool:
        """Whether the responses are in the same order as before, so that only the scale or the level is another one."""
        return self.agreement > t.SAME_ORDER and abs(self.length_correlation) <= t.LENGTH_EXPLAINS

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers of the sentences about it."""
        return {"step": self.step, "num_responses": self.num_responses, "share": self.share}

    def around(self, rollouts: Rollouts) -> tuple[Rollouts, Rollouts]:
        """The sequences since the change and those before it, without the steps of its interval in which it may have come."""
        return rollouts.since(self.high), rollouts.until(self.low - 1)


def changed_responses(
    rollouts: Rollouts, column: str, *, first: int, last: int, least: float
) -> ChangedResponses | None:
    """The step from `first` to `last` at which most of the repeated responses begin to be given something else.

    `column` is what they are given, `least` the least size of a difference. None where fewer than 10 came on both sides of
    every such step.
    """
    step, given = rollouts.step, getattr(rollouts, column)
    one, two = successive(comparable(rollouts, column), step)
    known = np.isfinite(given[one]) & np.isfinite(given[two]) & (step[two] > step[one])
    one, two = one[known], two[known]
    low, high, difference = step[one], step[two], given[two] - given[one]
    differs = np.abs(difference) > least
    before = differs[high < first]
    best: ChangedResponses | None = None
    for at in np.unique(step[(step >= first) & (step <= last)]):
        spans = (low < at) & (high >= at)
        num = int(spans.sum())
        share = float(differs[spans].mean()) if num >= FEWEST_SPANNING else 0.0
        if num >= FEWEST_SPANNING and (best is None or share > best.share):
            chosen = spans & differs
            lengths = rollouts.length[one][chosen]
            by_length = length_correlation(difference[chosen], lengths, high[chosen])
            steadily = correlation(difference[chosen], lengths * (high - low)[chosen])  # what a token earns grows
            if abs(steadily) > max(abs(by_length), t.LENGTH_EXPLAINS_WITHIN):
                by_length = steadily
            best = ChangedResponses(
                step=int(at), num_responses=num, share=share,
                share_before=float(before.mean()) if len(before) else math.nan,
                length_correlation=by_length, is_of_one_length=len(np.unique(lengths)) == 1,
                agreement=correlation(given[one][spans], given[two][spans]),
            )  # fmt: skip
    if best is None:
        return None
    inside = (high >= first) & (low <= last)
    _, earliest, latest = step_interval(differs[inside], low[inside], high[inside])
    return replace(best, low=min(earliest, best.step), high=max(latest, best.step))


def step_interval(differs: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[int, int, int]:
    """The most likely step of a change and its 95 % interval, from pairs: those with one before it and one since differ more.

    `differs` [M] bool; `low` and `high` [M], the steps of both.
    """
    steps = np.unique(high)
    first, last = np.searchsorted(steps, low, side="right"), np.searchsorted(steps, high)
    spanning = _spanning(first, last, np.ones(len(differs)), len(steps))
    differing = _spanning(first, last, differs.astype(float), len(steps))
    others, differing_others = len(differs) - spanning, int(differs.sum()) - differing
    likelihood = _likelihood(differing, spanning) + _likelihood(differing_others, others)
    is_higher = (differing + 0.5) * (others + 1) > (differing_others + 0.5) * (spanning + 1)
    likelihood[~is_higher] = _likelihood(differs.sum(keepdims=True), np.array([len(differs)]))
    kept = steps[likelihood >= likelihood.max() - _INTERVAL]
    return int(steps[likelihood.argmax()]), int(kept[0]), int(kept[-1])


def _spanning(first: np.ndarray, last: np.ndarray, weight: np.ndarray, num: int) -> np.ndarray:
    """[num] the weight of the intervals, places `first` to `last`, that hold each place."""
    held: np.ndarray = np.cumsum(np.bincount(first, weight, num + 1) - np.bincount(last + 1, weight, num + 1))[:num]
    return held


def _likelihood(num_differing: np.ndarray, num: np.ndarray) -> np.ndarray:
    """Logarithm of the likelihood that so many of `num` pairs differ, at the probability that fits them."""
    rate = (num_differing + 0.5) / (num + 1)
    likelihood: np.ndarray = num_differing * np.log(rate) + (num - num_differing) * np.log1p(-rate)
    return likelihood
