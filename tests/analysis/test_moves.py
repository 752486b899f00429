"""What moves first in one run, and what of it each suspect tells: every bound on both sides."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from tim_trace.analysis.attribution import supposed
from tim_trace.analysis.attribution.facts import Facts
from tim_trace.analysis.attribution.mismatch import RunMismatch
from tim_trace.analysis.attribution.moves import NOTHING, Column, Moves, read_moves
from tim_trace.analysis.attribution.rollouts import (
    ChangedResponses,
    KeptRewards,
    RepeatedResponses,
    Rollouts,
    ScoredRows,
    explained_by_length,
    is_near,
    kept_rewards,
    relation_by_step,
    repeated_responses,
    scored_rows,
)
from tim_trace.analysis.attribution.staleness import StillEngine, read_still_engine
from tim_trace.analysis.attribution.suspects import timing
from tim_trace.analysis.dynamics.fall import Fall, Outcome, _is_beyond_what_was, _means
from tim_trace.analysis.dynamics.recorded import RecordedChange
from tim_trace.analysis.dynamics.series import Series

# The functions of the package hide its modules of the same names.
advantages, changed, entropy, pairing, reference, reward, staleness, truncation = (
    import_module(f"tim_trace.analysis.attribution.suspects.{name}")
    for name in ("advantages", "changed", "entropy", "pairing", "reference", "reward", "staleness", "truncation")
)

WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN = 0.7, 1.5, 2.5, 4.0, 7.0
STEPS = np.arange(1, 61)
FALL = Fall(
    outcome="reward", onset_of="reward", kind="collapse", step=31, low=30, high=32, interval=(29, 33), fallen=35, before=0.8,
    after=0.3, size_in_sd=9.0,
)  # fmt: skip
FIRST, LAST = 24, 35
"""The steps at which this fall may have begun with a move."""


def codes(evidence):
    return {each.code: each.points for each in evidence}


# --- a quantity leaves what it was -------------------------------------------------------------------------------------


def column(*since, base=15, least=1.0):
    """A column that was 0, and then what is given, in units of its least scatter."""
    values = np.r_[np.zeros(base), since]
    return Column(np.arange(1, len(values) + 1), values * least, least)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("least", [1.0, 0.05])
@pytest.mark.parametrize(("since", "moves"), [
    ((5.9, 9, 9, 9), False), ((6.1, 9, 9, 9), True), ((6.1, 3.5, 3.5, 9), False), ((6.1, 3.5, 3.7, 9), True),
    ((6.1, 3.7, 3.7, 0), True), ((6.1, 3.7, 0, 0), False), ((6.1, -9, -9, -9), False), ((6.1,), True), ((6.1, 3.5), False),
    ((6.1, 3.7), True), ((6.1, 3.7, 3.5), False), ((6.1, 3.7, 3.7), True),
])  # fmt: skip
def test_a_quantity_moves_by_six_deviations_and_stays_away(sign, least, since, moves):
    found = column(*(sign * np.array(since)), least=least).moves(15)
    assert found == (pytest.approx(sign * since[0]) if moves else 0.0)


@pytest.mark.parametrize(("base", "is_known"), [(3, False), (4, True)])
def test_a_quantity_moves_after_four_steps_at_the_earliest(base, is_known):
    found = column(9, 9, 9, 9, base=base)
    assert (found.moves(base) > 0, len(found.off(base)) > 0) == (is_known, is_known)


def test_a_quantity_is_held_against_the_fifteen_steps_before():
    drifting = Column(STEPS, np.r_[np.full(20, -50.0), np.zeros(15), np.full(25, 7.0)], 1.0)
    assert drifting.moves(35) == 7.0
    assert drifting.moves(34) == 0.0


@pytest.mark.parametrize(("base", "scatter"), [
    ([-1.0, 1.0] * 8, np.sqrt(2) * 1.4826),  # from step to step
    ([0.0] * 4 + [3.0] * 4, 1.5 * 1.4826),  # around the median
    ([0.0, 0.1] * 7 + [0.0, 90.0], 11.25),  # by the standard deviation, halved
    ([0.0] * 16, 1e-12),
])  # fmt: skip
def test_what_a_quantity_scatters_by(base, scatter):
    values = np.array([*base, 100.0])[-16:]
    off = Column(np.arange(16), values, 0.0).off(15)
    assert off[0] == pytest.approx((100 - np.median(values[:-1])) / scatter, rel=0.1)


def steady(at=30, by=9.0, *, before=0.0, least=1.0, until=None):
    """A column that is another one from a step on, and as it was after `until`."""
    since = (at <= STEPS) & (STEPS <= (until or STEPS[-1]))
    return Column(STEPS, np.where(since, before + by, before), least)


def moves_of(first=FIRST, last=LAST, **columns):
    return Moves(columns=columns, first=first, last=last)


def test_a_move_is_asked_by_step_and_name():
    moves = moves_of(entropy=steady(30, -9.0))
    assert [moves.size("entropy", step) for step in (29, 30, 31)] == [0.0, -9.0, 0.0]
    assert [moves.size("entropy", 1000), moves.size("nothing", 30), moves.step("nothing")] == [0.0, 0.0, None]
    assert not NOTHING.moves_at(30, "entropy")


@pytest.mark.parametrize(("at", "step"), [(23, None), (24, 24), (35, 35), (36, None)])
def test_the_first_step_of_a_move_lies_near_the_fall(at, step):
    assert moves_of(entropy=steady(at)).step("entropy") == step


@pytest.mark.parametrize(("asked", "moves"), [(29, False), (30, True), (34, True), (35, False)])
def test_a_move_counts_for_the_four_steps_after_it(asked, moves):
    assert moves_of(entropy=steady(30)).moves_at(asked, "reward", "entropy") == moves


def test_steps_that_were_not_recorded_do_not_move():
    every_other = Column(STEPS[::2], steady(30).values[::2], 1.0)
    assert [moves_of(entropy=every_other).size("entropy", step) for step in (30, 31)] == [0.0, 9.0]


# --- a correlation is lost ---------------------------------------------------------------------------------------------


def lost_at(since, *, before=0.8, least=0.05, at=30, last=LAST):
    """The step at which a correlation that was `before` is lost, of those that follow from step 30 on."""
    values = np.full(60, before)
    values[at - 1 : at - 1 + len(since)] = since
    return moves_of(last=last, relation=Column(STEPS, values, least)).breaks("relation")


@pytest.mark.parametrize(("value", "step"), [(0.37, None), (0.35, 30)])
def test_a_correlation_breaks_by_four_deviations_at_once(value, step):
    assert lost_at([value] * 31, least=0.11) == step


@pytest.mark.parametrize(("two", "step"), [((0.37, 0.0), None), ((0.0, 0.37), None), ((0.35, 0.35), 30)])
def test_a_correlation_breaks_at_two_steps_in_a_row(two, step):
    assert lost_at([*two, *[0.37] * 29], least=0.11) == step


@pytest.mark.parametrize(("before", "step"), [(0.19, None), (0.21, 30)])
def test_a_correlation_that_was_hardly_there_cannot_break(before, step):
    assert lost_at([-0.5] * 31, before=before) == step


@pytest.mark.parametrize(("rest", "step"), [(0.41, None), (0.39, 30)])
def test_half_of_a_correlation_is_lost_for_good(rest, step):
    assert lost_at([0.1, 0.1, *[rest] * 29], at=30) == step


@pytest.mark.parametrize(("rest", "step"), [(0.11, None), (0.09, 30)])
def test_a_small_correlation_loses_two_deviations_for_good(rest, step):
    assert lost_at([-0.2, -0.2, *[rest] * 29], before=0.3, least=0.1) == step


@pytest.mark.parametrize(("num_back", "step"), [(2, 16), (3, None)])
def test_nine_of_ten_steps_until_the_fall_are_without_a_correlation_that_is_lost(num_back, step):
    since = np.where(np.arange(20) < 20 - num_back, 0.0, 0.8)
    assert lost_at(since, at=16) == step


def test_a_correlation_that_returns_after_the_fall_was_lost_all_the_same():
    assert lost_at([0.0] * 6) == 30
    assert lost_at([0.0] * 4) is None
    assert lost_at([0.0] * 31, at=36) is None


def test_a_correlation_that_nobody_recorded_is_not_lost():
    assert NOTHING.breaks("relation") is None


# --- what is read from a run -------------------------------------------------------------------------------------------


def rows(num_steps=60, n=8, **columns):
    """The sequences of some steps, n each in two groups; a column given as [steps, n] or [n] or a number."""
    size = num_steps * n
    step = np.repeat(np.arange(1, num_steps + 1), n)
    usual = {
        "step": step, "group": (np.arange(size) // (n // 2)), "prompt": np.arange(size) // (n // 2), "response": np.arange(size),
        "whole": np.arange(size), "ending": 0, "opening": np.arange(size), "reference": np.nan, "length": 10.0,
    }  # fmt: skip
    names = Rollouts.__dataclass_fields__
    given = {
        name: np.asarray(np.broadcast_to(columns.get(name, usual.get(name, 0.0)), (num_steps, n)).ravel())
        if np.ndim(columns.get(name, usual.get(name, 0.0))) != 1 or name in columns and len(columns[name]) == n
        else np.asarray(columns.get(name, usual.get(name)))
        for name in names
    }  # fmt: skip
    return Rollouts(**given)
