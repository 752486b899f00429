from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import overload

import numpy as np

from ...schemas.errors import InvalidOption, NothingToCompare
from ...schemas.passes import REPLAY_PREFIX, ROLLOUT, TRAIN
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..facts.read_series import read_series
from ..facts.rollouts import read_rollouts
from ..statement import Statement
from ..trace.columns import parse_pair, passes_with, tell_sampled
from ..trace.database import Database
from ..trace.tokens import tokens_by_step
from ..views import open_database
from .comparison import KINDS, Comparison, RunDifference, stated_differences
from .passes import PassComparison, compare_passes
from .series import sequence_differences, series_differences, token_differences

DEFAULT_PAIR = f"{TRAIN}:{ROLLOUT}"

Trace = str | os.PathLike[str] | Database


@overload
def compare(a: Trace, b: Trace, *, pair: str = ..., steps: str = ..., progress: Progress = ...) -> Comparison: ...
@overload
def compare(
    a: Trace, b: None = None, *, against: str | None = ..., steps: str = ..., progress: Progress = ...
) -> PassComparison: ...
def compare(
    a: str | os.PathLike[str] | Database,
    b: str | os.PathLike[str] | Database | None = None,
    *,
    pair: str = DEFAULT_PAIR,
    against: str | None = None,
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> Comparison | PassComparison:
    """List the differences between two runs, or between all passes of one run.

    Without `b`, group the passes of run `a` into classes with bitwise equal logprobs. The result, a PassComparison,
    lists each class's distance from the reference (`against`, or the largest class), tokens where one class is far from
    the others, and passes whose recorded settings contradict their logprobs. Replays are not compared.

    With `b`, the result is a Comparison: the differences, earliest first, with the step at which each begins. It covers
    settings, sampling settings, the most frequent execution contract for each pass and step, and at the shared steps:

    - prompts, and responses to identical prompts
    - loss masks and finish reasons of identical responses
    - logprobs, bit for bit, until two responses to one prompt diverge
    - rewards for identical responses (tolerance 1e-6 times the step's largest reward), also if only one run has one
    - advantages for identical responses in groups with the same rewards in both runs
    - policy-version lags, and the learning rate
    - every other series that `dynamics` reports: the difference between the runs is split at its change points, and begins
      with the first segment whose mean is more than 4.5 standard errors from 0

    Sequences are paired within a step in recording order: identical ones first, then by prompt. `pair` names the two
    passes whose mismatch is compared. `steps` (3:80, -10:, 2:200:2) restricts both runs. Replays are not compared.

    Raises NothingToCompare if the runs share no step, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    if b is None:
        if pair != DEFAULT_PAIR:
            raise InvalidOption("needs a second run; to choose a reference pass, use against instead", option="pair")
        with progress("comparing passes", 1):
            return compare_passes(open_database(a, steps), against)
    if against is not None:
        raise InvalidOption("applies to the passes of one run, but two runs were given", option="against")
    names = parse_pair(pair)
    of_a, of_b = open_database(a, steps), open_database(b, steps)
    for database in (of_a, of_b):
        tell_sampled(database, names)
    with progress("comparing runs", 4) as advance:
        series_a, series_b = (read_series(database, pair=names) for database in (of_a, of_b))
        shared = sorted(tokens_by_step(of_a).keys() & tokens_by_step(of_b).keys())
        of_series = [{int(step) for one in series.values() for step in one.steps} for series in (series_a, series_b)]
        if not shared and not of_series[0] & of_series[1]:
            raise NothingToCompare(
                f"{of_a.given[0]} and {of_b.given[0]} have no step in common; compare runs that recorded the same steps"
            )
        advance(1)
        found = [*stated_differences(of_a, of_b, shared)]
        advance(1)
        found += _steps(of_a, of_b)
        if shared:
            rollouts_a, rollouts_b = (read_rollouts(database, names).at(shared) for database in (of_a, of_b))
            found += sequence_differences(rollouts_a, rollouts_b)
            passes = [passes_with(database, "logprobs", first_use=True) for database in (of_a, of_b)]
            names_of_both = sorted(name for name in passes[0] & passes[1] if not name.startswith(REPLAY_PREFIX))
            found += token_differences(of_a, of_b, shared, names_of_both)
        advance(1)
        same, within = list[str](), list[str]()
        found += series_differences(series_a, series_b, same, within)
        advance(1)
    return Comparison(
        a=of_a.given[0], b=of_b.given[0], pair=pair, steps=steps, num_steps=len(shared or of_series[0] & of_series[1]), same=tuple(same),
        differences=tuple(sorted(found, key=_order)), within_scatter=tuple(within),
        note_codes=tuple(_notes(series_a.keys(), series_b.keys(), shared)),
    )  # fmt: skip


def _order(one: RunDifference) -> tuple[int, int, float, str]:
    size = 0.0 if one.kind != "series" else -(np.inf if one.size_in_sd is None else one.size_in_sd)
    return one.step, KINDS.index(one.kind), size, one.name


def _steps(a: Database, b: Database) -> Iterator[RunDifference]:
    of_a, of_b = tokens_by_step(a).keys(), tokens_by_step(b).keys()
    alone = sorted(of_a ^ of_b)
    if alone:
        first = alone[0]
        one, two = ("recorded" if first in run else None for run in (of_a, of_b))
        yield RunDifference(kind="steps", name="", step=first, a=one, b=two, values={"num_steps": len(alone)})


def _notes(of_a: Collection[str], of_b: Collection[str], shared: list[int]) -> Iterator[Statement]:
    if not shared:
        yield Statement(code="no_sequences")
    for code, one, other in (("only_a", of_a, of_b), ("only_b", of_b, of_a)):
        names = [name for name in one if name not in other]
        if names:
            yield Statement(code=code, values={"series": ", ".join(names)})
