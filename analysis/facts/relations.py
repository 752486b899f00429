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
    overall = correlation(difference[chosen], run.length[at_a][chosen])
    is_other = len(differs) > 0 and differs.mean() > t.ALMOST_ALL
    if chosen.sum() > 2 and abs(overall) > (t.LENGTH_EXPLAINS if is_other else t.LENGTH_IS_ALL):
        return overall
    within, of_control = (relation(part, "length", "reward").correlation for part in (run, control))
    is_paid = abs(within) > t.LENGTH_PAYS and not abs(of_control) > t.LENGTH_PAYS / 2
    goes = run.length[3 * len(run.length) // 4 :].mean() - control.length.mean()  # the last quarter of the run
    return within if is_paid and is_other and goes * within > 0 else 0.0


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
    return ChangedResponses(
        step=at, num_responses=int(spans.sum()), share=shares[at],
        length_correlation=correlation(difference[chosen], rollouts.length[one][chosen]),
        share_before=float(before.mean()) if len(before) else math.nan,
    )  # fmt: skip
