from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..statement import Measured
from ..trace.ragged import centred
from . import thresholds as t
from .rollouts import FEWEST_COMPARED, FEWEST_SPANNING, Rollouts, comparable, successive, value_differences

_FEWEST_OF_LENGTH = 5


class Relation(NamedTuple):
    correlation: float
    by_group: float


def relation(rollouts: Rollouts, first: str, second: str) -> Relation:
    """Correlate two columns within groups. Return NaN unless both columns vary in at least 30 groups."""
    x, y, known = _in_groups(rollouts, first, second)
    (xy, xx, yy), spread, by_group = _correlations(x, y, rollouts.group[known])
    if spread.sum() < FEWEST_COMPARED:
        return Relation(math.nan, math.nan)
    return Relation(float(xy.sum() / np.sqrt(xx.sum() * yy.sum())), float(by_group.mean()))


def _correlations(x: np.ndarray, y: np.ndarray, place: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return the sums of xy, xx and yy for each index in `place`, a mask of the indices where both x and y vary, and
    the correlation of x and y at these indices."""
    sums = [np.bincount(place, product) for product in (x * y, x**2, y**2)]
    spread = (sums[1] > 1e-12) & (sums[2] > 1e-12)
    xy, xx, yy = (each[spread] for each in sums)
    return sums, spread, xy / np.sqrt(xx * yy)


def _in_groups(rollouts: Rollouts, first: str, second: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = [getattr(rollouts, name) for name in (first, second)]
    known = np.isfinite(columns[0]) & np.isfinite(columns[1])
    x, y = (centred(column[known], rollouts.group[known]) for column in columns)
    return x, y, known


def relation_by_step(rollouts: Rollouts, first: str, second: str) -> tuple[np.ndarray, np.ndarray]:
    x, y, known = _in_groups(rollouts, first, second)
    steps, of_step = np.unique(rollouts.step[known], return_inverse=True)
    _, spread, by_step = _correlations(x, y, of_step)
    return steps[spread], by_step


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0 else 0.0


def length_correlation(difference: np.ndarray, length: np.ndarray, step: np.ndarray) -> float:
    overall = correlation(difference, length)
    _, of_step = np.unique(step, return_inverse=True)
    x, y = centred(difference, of_step), centred(length.astype(float), of_step)
    _, spread, by_step = _correlations(x, y, of_step)
    num = np.bincount(of_step)[spread]
    weight = (num - 1)[num > 2]
    if weight.sum() < FEWEST_SPANNING:
        return overall
    within = float(np.average(by_step[num > 2], weights=weight))
    return within if abs(within) > max(abs(overall), t.LENGTH_EXPLAINS_WITHIN) else overall


def explained_by_length(run: Rollouts, control: Rollouts) -> tuple[float, float]:
    """Compare two runs' rewards for identical responses. Return the share of the differences' variance that response
    length explains, and the sign of its effect.

    Return (0, 0) if there are too few shared responses, or if their rewards hardly differ.
    """
    _, at_a, at_b = np.intersect1d(run.whole, control.whole, return_indices=True)
    difference, base = run.reward[at_a] - control.reward[at_b], control.reward[at_b]
    known = np.isfinite(difference)
    difference, base, at = difference[known], base[known], at_a[known]
    length = run.length[at]
    counts = np.unique(length, return_counts=True)[1]
    total = float(((difference - difference.mean()) ** 2).sum()) if len(difference) else 0.0
    num_other = int((np.abs(difference) > 1e-9).sum())
    if (counts >= _FEWEST_OF_LENGTH).sum() < 2 or num_other < _FEWEST_OF_LENGTH or total <= 1e-12 * len(difference):
        return 0.0, 0.0
    within_group = correlation(difference, centred(run.length, run.group)[at]) ** 2
    rest = centred(difference, np.unique(np.round(base, 6), return_inverse=True)[1])
    of_rest = _explained(rest, length) if float((rest**2).sum()) >= t.MATERIAL_REST * total else 0.0
    share = max(_explained(difference, length), within_group, of_rest)
    return share, float(np.sign(correlation(difference, length))) or 1.0


def _explained(values: np.ndarray, length: np.ndarray) -> float:
    _, place, counts = np.unique(length, return_inverse=True, return_counts=True)
    n, left = len(values), values - (np.bincount(place, values) / counts)[place]
    total = float(((values - values.mean()) ** 2).sum()) / max(n - 1, 1)
    return 1 - float((left**2).sum()) / max(n - len(counts), 1) / total


def pays_length_otherwise(run: Rollouts, control: Rollouts) -> float:
    _, at_a, at_b = np.intersect1d(run.whole, control.whole, return_indices=True)
    scale = np.fmax.reduce(np.abs(control.reward), initial=1.0)
    difference, differs = value_differences(run.reward[at_a], control.reward[at_b], scale)
    chosen = np.isfinite(difference) & differs
    overall = length_correlation(difference[chosen], run.length[at_a][chosen], run.step[at_a][chosen])
    is_other = len(differs) > 0 and differs.mean() > t.ALMOST_ALL
    if chosen.sum() > 2 and abs(overall) > (t.LENGTH_EXPLAINS if is_other else t.LENGTH_IS_ALL):
        return overall
    within, of_control = (relation(part, "length", "reward").correlation for part in (run, control))
    is_paid = abs(within) > t.LENGTH_PAYS and not abs(of_control) > t.LENGTH_PAYS / 2
    goes = run.length[3 * len(run.length) // 4 :].mean() - control.length.mean()  # the last quarter of the run
    return within if is_paid and is_other and goes * within > 0 else 0.0


_MOST_LENGTHS = 24
_LONG_BEFORE, _LONG_SINCE, _FEWEST_TELLING = 20, 15, 5
"""Maximum number of steps before and after a change over which rewards are compared with lengths, and the minimum."""


def explained_by_length_since(rollouts: Rollouts, last: int) -> tuple[int, float, float] | None:
    """Find the step (at most `last`) where length begins to explain more of the reward variance within steps.

    Return the step, and the explained variance before and after it. Both are divided by the larger of the two total
    variances, so that a tiny remaining variance has little weight when nearly all rewards become equal. Before the
    first step, the explained variance counts as 0. Return None if there are too few steps.
    """
    rows = rollouts.ordered(np.isfinite(rollouts.reward))
    steps, at = np.unique(rows.step, return_inverse=True)
    if len(steps) < _FEWEST_TELLING:
        return None
    reward = centred(rows.reward, at)
    edges = np.unique(np.quantile(rows.length, np.linspace(0, 1, _MOST_LENGTHS + 1)))
    place, num = np.searchsorted(edges, rows.length), len(edges)
    counts_SL, sums_SL, squares_SL = (
        np.r_[
            np.zeros((1, num)), np.cumsum(np.bincount(at * num + place, weights, len(steps) * num).reshape(-1, num), 0)
        ]
        for weights in (np.ones(len(reward)), reward, reward**2)
    )

    def explained(first: int, end: int) -> tuple[float, float]:
        """Return the variance that length explains (adjusted for the number of lengths), and the total variance."""
        counts, sums = counts_SL[end] - counts_SL[first], sums_SL[end] - sums_SL[first]
        known, n = counts > 0, float(counts.sum())
        whole = float((squares_SL[end] - squares_SL[first]).sum()) / max(n - (end - first), 1.0)
        left = n * whole - float((sums[known] ** 2 / counts[known]).sum())
        return max(whole - left / max(n - known.sum() - (end - first), 1.0), 0.0), whole

    best = (0, 0.0, 0.0)
    for first in (0, *range(_FEWEST_TELLING, len(steps) - _FEWEST_TELLING + 1)):
        if steps[first] > last:
            break
        of_length, whole = explained(first, min(first + _LONG_SINCE, len(steps)))
        usual, whole_before = explained(max(first - _LONG_BEFORE, 0), first) if first else (0.0, whole)
        largest = max(whole, whole_before, 1e-12)
        if (of_length - usual) / largest > best[2] - best[1]:
            best = first, usual / largest, of_length / largest
    return int(steps[best[0]]), *best[1:]


def new_reward_values(rollouts: Rollouts, last: int) -> tuple[int, float, float]:
    """Find the step (at most `last`) where rewards begin to take values that never occurred before.

    Return the step, and the shares of rewards with new values before it and from it on. Each share covers a few steps,
    and a value is new if it first occurs in them. For continuous rewards, both shares are near 1.
    """
    rows = rollouts.ordered(np.isfinite(rollouts.reward))
    steps, at = np.unique(rows.step, return_inverse=True)
    scale = float(np.abs(rows.reward).max(initial=1e-9))
    _, first_row, value = np.unique(np.round(rows.reward / scale, 6), return_index=True, return_inverse=True)
    starts, first = np.searchsorted(at, np.arange(len(steps) + 1)), at[first_row][value]

    def share(begins: int) -> float:
        """Return the share of rows, in a window of steps from index `begins`, whose reward values first occur there."""
        return float((first[starts[begins] : starts[begins + _FEWEST_TELLING]] >= begins).mean())

    shares = np.array([share(begins) for begins in range(max(len(steps) - _FEWEST_TELLING + 1, 0))])
    found = (0, 0.0, 0.0)
    for begins in range(2 * _FEWEST_TELLING, int(np.searchsorted(steps[: len(shares)], last, "right"))):
        usual = float(shares[begins - 2 * _FEWEST_TELLING : begins - _FEWEST_TELLING + 1].max())
        if shares[begins] - usual > found[2] - found[1]:
            found = int(steps[begins]), usual, float(shares[begins])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedResponses:
    """A step at which the reward or reference logprob of repeated responses changes."""

    step: int
    num_responses: int
    share: float
    """Share of responses with a changed value."""
    share_before: float
    """Share with a changed value before the searched steps, or NaN if no response repeats there."""
    length_correlation: float
    agreement: float = 0.0

    @property
    def is_rescaled(self) -> bool:
        return self.agreement > t.SAME_ORDER and abs(self.length_correlation) <= t.LENGTH_EXPLAINS

    @property
    def values(self) -> dict[str, Measured]:
        return {"step": self.step, "num_responses": self.num_responses, "share": self.share}


def changed_responses(
    rollouts: Rollouts, column: str, *, first: int, last: int, least: float
) -> ChangedResponses | None:
    """Find the step in [first, last] at which `column` changes by more than `least` for the largest share of responses.

    Only responses that occur both before the step and at or after it are compared. Return None if no step has enough
    of them.
    """
    step, given = rollouts.step, getattr(rollouts, column)
    one, two = successive(comparable(rollouts, column), step)
    known = np.isfinite(given[one]) & np.isfinite(given[two]) & (step[two] > step[one])
    one, two = one[known], two[known]
    low, high, difference = step[one], step[two], given[two] - given[one]
    differs = np.abs(difference) > least
    before = differs[high < first]
    shares = {}
    for at in np.unique(step[(step >= first) & (step <= last)]).tolist():
        spans = (low < at) & (high >= at)
        if spans.sum() >= FEWEST_SPANNING:
            shares[at] = float(differs[spans].mean())
    if not shares:
        return None
    at = max(shares, key=shares.__getitem__)
    spans = (low < at) & (high >= at)
    chosen = spans & differs
    lengths = rollouts.length[one][chosen]
    by_length = length_correlation(difference[chosen], lengths, high[chosen])
    # If a per-token bonus grows by the same amount at every step, the difference is proportional to the length times the
    # number of steps in between.
    steadily = correlation(difference[chosen], lengths * (high - low)[chosen])
    if abs(steadily) > max(abs(by_length), t.LENGTH_EXPLAINS_WITHIN):
        by_length = steadily
    return ChangedResponses(
        step=at, num_responses=int(spans.sum()), share=shares[at], length_correlation=by_length,
        share_before=float(before.mean()) if len(before) else math.nan,
        agreement=correlation(given[one][spans], given[two][spans]),
    )  # fmt: skip
