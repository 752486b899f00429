"""Find the series, sequences and logprobs that differ between two runs.

Shapes: n steps with a value in both runs, K sequence pairs, T tokens in these pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..facts.changes import FEWEST as FEWEST_CHANGES
from ..facts.changes import change_points
from ..facts.rollouts import Rollouts
from ..facts.series import LINEAR, LOG, MISMATCH, Series, shared_values
from ..facts.two_runs import RowDifferences, read_prefixes, row_differences, values_differ
from ..statistics.noise import half_square_difference, highest_long_run_variance, peaks, robust_sd, tamed
from ..trace.database import Database
from ..trace.ragged import array_of
from ..trace.tokens import step_ranges, tokens_by_step
from .comparison import RunDifference

FEWEST = 3
"""Minimum number of steps for estimating the noise in a difference."""
BEYOND_SD = 4.5
"""Minimum mean difference to report (standard errors). At this threshold, false positives stay below 0.5%, although
every possible first step is tested."""

FEWEST_PEAKS = 9
"""Minimum number of steps over which peaks must differ. These contain at least three steps that differ."""

LAGS = ("policy_lag", "version_lag")
"""Series that count updates. They have no noise, so every difference is reported."""


def series_differences(
    a: Mapping[str, Series], b: Mapping[str, Series], same: list[str], within: list[str]
) -> Iterator[RunDifference]:
    """Yield the series that differ.

    The names of bitwise equal series are appended to `same`, and those of series that differ only by noise to `within`.
    """
    for name in a:
        if name not in b:
            continue
        yield from _not_finite(a[name], b[name])
        steps, one, two = shared_values(a[name], b[name])
        unequal = one != two
        if not unequal.any():
            same.append(name)
            continue
        is_visible = values_differ(one, two)
        differs = is_visible & (name in (*LAGS, "learning_rate"))
        if differs.any():
            first = int(np.argmax(differs))
            yield RunDifference(
                kind="lag" if name in LAGS else "series", name=name, step=int(steps[first]), a=float(one[first]),
                b=float(two[first]), values={} if name in LAGS else {"num_steps": int(differs.sum())},
            )  # fmt: skip
        elif is_visible.any() and (found := _apart(a[name], steps, one, two) or _peaks_apart(a[name], steps, one, two)):
            yield found
        else:
            within.append(name)


def _not_finite(a: Series, b: Series) -> Iterator[RunDifference]:
    shared = np.intersect1d(a.steps, b.steps)
    alone = np.intersect1d(np.setxor1d(a.not_finite, b.not_finite), shared)
    if len(alone):
        step = int(alone[0])
        one, two = (float(run.values[np.searchsorted(run.steps, step)]) for run in (a, b))
        yield RunDifference(kind="series", name=a.name, step=step, a=one, b=two, values={"num_steps": len(alone)})


def _apart(series: Series, steps: np.ndarray, a: np.ndarray, b: np.ndarray) -> RunDifference | None:
    first = int(np.argmax(a != b))
    joint = replace(series, values=np.concatenate([a, b])).scaled
    gap_n, since = (joint[: len(a)] - joint[len(a) :])[first:], steps[first:]
    difference = Series(series.name, since, gap_n, LINEAR, series.kind)
    cuts = [int(np.searchsorted(since, change.step)) for change in change_points(difference)]
    for low, end in pairwise([0, *cuts, len(since)]):
        start = low + _onset(gap_n[low:end])
        if end - start >= FEWEST and (size := _beyond(gap_n[start:end], gap_n[low:end])) is not None:
            return _levels(series, steps, (a, b), slice(first + start, first + end), "median", size)
    return None


def _peaks_apart(series: Series, steps: np.ndarray, a: np.ndarray, b: np.ndarray) -> RunDifference | None:
    """Find where one run's mismatch peaks lie beyond all values of the other run, at least once every three steps."""
    if series.kind != MISMATCH or series.scale != LOG or len(steps) < FEWEST_PEAKS:
        return None
    joint = replace(series, values=np.concatenate([a, b])).scaled
    for low, high in np.array([[joint[: len(a)], joint[len(a) :]], [joint[len(a) :], joint[: len(a)]]]):
        beyond = peaks(high) > low.max() + BEYOND_SD * robust_sd(np.diff(low)) / math.sqrt(2)
        ends = np.flatnonzero(np.diff(beyond, prepend=False, append=False)).reshape(-1, 2)
        for start, end in ends[np.diff(ends)[:, 0] >= FEWEST_PEAKS]:
            return _levels(series, steps, (peaks(a), peaks(b)), slice(start, end), "median peak")
    return None


def _levels(
    series: Series, steps: np.ndarray, of_runs: tuple[np.ndarray, np.ndarray], inside: slice, statistic: str, size: float = math.inf
) -> RunDifference:  # fmt: skip
    one, two = (float(np.median(values[inside])) for values in of_runs)
    return RunDifference(
        kind="series", name=series.name, step=int(steps[inside][0]), a=one, b=two,
        size_in_sd=None if math.isinf(size) else size,
        values={"num_steps": len(steps[inside]), "statistic": statistic},
    )  # fmt: skip


def _onset(gap_n: np.ndarray) -> int:
    """Return the step index where a jump from 0 to a constant fits best (least squares)."""
    from_here = np.cumsum(gap_n[::-1])[::-1]
    return int(np.argmax(from_here**2 / np.arange(len(gap_n), 0, -1))) if len(gap_n) else 0


def _beyond(apart_n: np.ndarray, stretch_n: np.ndarray) -> float | None:
    """Return |mean| of `apart_n` in units of its noise per step, inf if there is no noise, or None if not significant.

    With few steps, significance is judged by Student's t-distribution. Its quantile is approximated from the normal z
    by sqrt(df (exp(z^2 / df) - 1)) (Wallace, Annals of Mathematical Statistics 30, 1959).
    """
    mean = abs(float(apart_n.mean()))
    is_short = len(stretch_n) < FEWEST_CHANGES
    known = apart_n if is_short else tamed(stretch_n)
    if is_short:
        deviation = float(np.std(known, ddof=1))
    else:
        before = len(known) - len(apart_n)
        left = np.concatenate([known[:before], known[before:] - known[before:].mean()])
        deviation = math.sqrt(highest_long_run_variance(left, 2))
    df = len(known) - 1
    bound = math.sqrt(df * math.expm1(min(BEYOND_SD**2 / df, 700.0)))
    if mean <= max(bound * deviation / math.sqrt(len(apart_n)), 1e-12 * float(np.abs(stretch_n).max())):
        return None
    scatter = math.sqrt(half_square_difference(known, 1))
    return mean / scatter if scatter > 1e-9 * mean else math.inf


def sequence_differences(a: Rollouts, b: Rollouts) -> Iterator[RunDifference]:
    found = row_differences(a, b)
    pairs = found.pairs
    yield from _prompts(a, b, found)
    yield from _unequal("responses", "", found.step_K, pairs.equal)
    for kind, name, differs_K, fair_K in (
        ("rewards", "reward", found.rewards_K, pairs.equal),
        ("advantages", "advantage", found.advantages_K, found.is_alike_K),
    ):
        one, two = getattr(a, name)[pairs.a], getattr(b, name)[pairs.b]
        yield from _first(kind, found.step_K, one, two, differs_K, differs_K | (fair_K & np.isfinite(one - two)))


def _prompts(a: Rollouts, b: Rollouts, found: RowDifferences) -> Iterator[RunDifference]:
    others = found.steps_S[found.share_S < 1]
    if len(others):
        first = int(others[0])
        of_a, of_b = (np.unique(run.at_step(first).prompt) for run in (a, b))
        values = {"share": len(others) / len(found.steps_S), "num_steps": len(others)}
        yield RunDifference(
            kind="prompts", name="", step=first, a=f"{len(of_a)} prompts", b=f"{len(of_b)} prompts",
            values=values | {"num_shared": len(np.intersect1d(of_a, of_b))},
        )  # fmt: skip


def _unequal(kind: str, name: str, step_K: np.ndarray, equal_K: np.ndarray) -> Iterator[RunDifference]:
    if not equal_K.all():
        first = int(step_K[~equal_K].min())
        at_first = step_K == first
        text = f"{int((equal_K & at_first).sum())} of {int(at_first.sum())} equal"
        values = {"share": float((~equal_K).mean()), "num_pairs": len(equal_K)}
        yield RunDifference(kind=kind, name=name, step=first, a=text, b=text, values=values)


def _first(
    kind: str, step_K: np.ndarray, a_K: np.ndarray, b_K: np.ndarray, differs_K: np.ndarray, known_K: np.ndarray
) -> Iterator[RunDifference]:
    if differs_K.any():
        place = int(np.flatnonzero(differs_K)[np.argmin(step_K[differs_K])])
        values = {
            "share": float(differs_K.sum() / known_K.sum()), "num_pairs": int(known_K.sum()),
            "largest": float(np.fmax.reduce(np.abs(a_K - b_K)[differs_K])),
        }  # fmt: skip
        yield RunDifference(
            kind=kind, name="", step=int(step_K[place]), a=float(a_K[place]), b=float(b_K[place]), values=values
        )


@dataclass(slots=True)
class _PassDifference:
    step: int | None = None
    a: float = 0.0
    b: float = 0.0
    num_tokens: int = 0
    num_unequal: int = 0
    largest: float = 0.0
    largest_step: int = 0

    def add(self, step_K: np.ndarray, num_K: np.ndarray, a_T: np.ndarray, b_T: np.ndarray) -> None:
        a_T, b_T = a_T.astype(np.float32), b_T.astype(np.float32)
        unequal = np.flatnonzero(a_T.view(np.int32) != b_T.view(np.int32))
        self.num_tokens += len(a_T)
        self.num_unequal += len(unequal)
        if not len(unequal):
            return
        step_T = step_K[np.searchsorted(np.cumsum(num_K), unequal, side="right")]
        if self.step is None:
            self.step, self.a, self.b = int(step_T[0]), float(a_T[unequal[0]]), float(b_T[unequal[0]])
        size = np.abs(a_T[unequal].astype(np.float64) - b_T[unequal])
        size[~np.isfinite(size)] = 0.0
        place = int(size.argmax())
        if size[place] > self.largest:
            self.largest, self.largest_step = float(size[place]), int(step_T[place])


COLUMNS = {
    "response_mask": "hash(coalesce(response_mask, list_resize([]::BOOLEAN[], num_response_tokens, true)))::DOUBLE",
    "finish_reason": "CASE WHEN finish_reason IS NOT NULL THEN hash(finish_reason)::DOUBLE END",
}


def token_differences(a: Database, b: Database, steps: Sequence[int], passes: Sequence[str]) -> Iterator[RunDifference]:
    """Yield each of COLUMNS that differs between identical responses, and each pass's first and largest logprob
    difference. Logprobs are compared until the responses diverge."""
    found = {name: _PassDifference() for name in passes}
    tokens, wanted = tokens_by_step(a), set(steps)
    columns = "".join(f", {value} AS {name}" for name, value in COLUMNS.items())
    equal: list[np.ndarray] = []
    for chunk in step_ranges({step: num for step, num in tokens.items() if step in wanted}):
        prefixes = read_prefixes(a, b, chunk, passes, columns)
        sides = [{name: array_of(rows[name]) for name in COLUMNS} for rows in (prefixes.a, prefixes.b)]
        is_equal = [~(np.abs(sides[0][name] - sides[1][name]) > 0) for name in COLUMNS]
        equal.append(np.stack([array_of(prefixes.a["step"]), *is_equal])[:, prefixes.equal_K])
        for name, of_pass in found.items():
            of_pass.add(array_of(prefixes.a["step"]), *prefixes.logprobs(name))
    step_K, *of_columns = np.concatenate(equal, axis=1)
    for name, equal_K in zip(COLUMNS, of_columns, strict=True):
        yield from _unequal("columns", name, step_K, equal_K > 0)
    for name, of_pass in found.items():
        if of_pass.step is not None:
            yield RunDifference(
                kind="logprobs", name=name, step=of_pass.step, a=of_pass.a, b=of_pass.b,
                values={
                    "share": of_pass.num_unequal / of_pass.num_tokens, "num_tokens": of_pass.num_tokens,
                    "largest": of_pass.largest, "largest_step": of_pass.largest_step,
                },
            )  # fmt: skip
