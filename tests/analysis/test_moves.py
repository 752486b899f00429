"""What moves first in one run, and what of it each suspect tells: every bound on both sides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tim_trace.analysis.attribution import attribute as silent
from tim_trace.analysis.attribution.attribute import attribute
from tim_trace.analysis.attribution.attribution import Attribution, SupposedCause, Suspect
from tim_trace.analysis.attribution.run_facts import Facts
from tim_trace.analysis.attribution.text import attribution_text, verdict_sentence
from tim_trace.analysis.facts.changes import NOTHING, Moves, Quantity, read_moves
from tim_trace.analysis.facts.mismatch import StillEngine, read_still_engine
from tim_trace.analysis.facts.recorded import RecordedChange
from tim_trace.analysis.facts.relations import ChangedResponses, explained_by_length, relation_by_step
from tim_trace.analysis.facts.rollouts import RepeatedResponses, Rollouts, repeated_responses
from tim_trace.analysis.facts.series import Fall, Outcome, Series, _is_beyond_what_was, _means
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.statistics.noise import level_deviation
from tim_trace.tracer.recorder import Recorder

# The functions of the package hide its modules of the same names.

WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN = 0.7, 1.5, 2.5, 4.0, 7.0
STEPS = np.arange(1, 61)
FALL = Fall(
    outcome="reward", onset_of="reward", kind="collapse", step=31, low=30, high=32, interval=(29, 33), fallen=35,
    before=0.8,
    after=0.3, size_in_sd=9.0,
)  # fmt: skip
FIRST, LAST = 24, 35
"""The steps at which this fall may have begun with a move."""


def codes(evidence):
    return {each.code: each.points for each in evidence}


# --- a quantity leaves what it was ------------------------------------------------------------------------------------


def column(*since, base=15, least=1.0):
    """A column that was 0, and then what is given, in units of its least scatter."""
    values = np.r_[np.zeros(base), since]
    return Quantity(np.arange(1, len(values) + 1), values * least, least)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("least", [1.0, 0.05])
@pytest.mark.parametrize(("since", "moves"), [
    ((5.9, 9, 9, 9), False), ((6.1, 9, 9, 9), True), ((6.1, 3.5, 3.5, 9), False), ((6.1, 3.5, 3.7, 9), True),
    ((6.1, 3.7, 3.7, 0), True), ((6.1, 3.7, 0, 0), False), ((6.1, -9, -9, -9), False), ((6.1,), True),
    ((6.1, 3.5), False),
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
    drifting = Quantity(STEPS, np.r_[np.full(20, -50.0), np.zeros(15), np.full(25, 7.0)], 1.0)
    assert drifting.moves(35) == 7.0
    assert drifting.moves(34) == 0.0


@pytest.mark.parametrize(("base", "scatter"), [
    ([-1.0, 1.0] * 8, np.sqrt(2) * 1.4826),  # from step to step
    ([0.0] * 6 + [3.0] * 5 + [6.0] * 5, 3 * 1.4826),  # around the median
    ([0.0, 0.1] * 7 + [0.0, 90.0], 11.2),  # by the standard deviation, halved
    ([0.0] * 16, 1e-12),
])  # fmt: skip
def test_what_a_quantity_scatters_by(base, scatter):
    values = np.array([*base, 100.0])[-16:]
    off = Quantity(np.arange(16), values, 0.0).off(15)
    assert off[0] == pytest.approx((100 - np.median(values[:-1])) / scatter, rel=0.01)


def steady(at=30, by=9.0, *, before=0.0, least=1.0, until=None):
    """A column that is another one from a step on, and as it was after `until`."""
    since = (at <= STEPS) & ((until or STEPS[-1]) >= STEPS)
    return Quantity(STEPS, np.where(since, before + by, before), least)


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
    every_other = Quantity(STEPS[::2], steady(30).values[::2], 1.0)
    assert [moves_of(entropy=every_other).size("entropy", step) for step in (30, 31)] == [0.0, 9.0]


# --- a correlation is lost --------------------------------------------------------------------------------------------


def lost_at(since, *, before=0.8, least=0.05, at=30, last=LAST):
    """The step at which a correlation that was `before` is lost, of those that follow, starting at step 30."""
    values = np.full(60, before)
    values[at - 1 : at - 1 + len(since)] = since
    return moves_of(last=last, relation=Quantity(STEPS, values, least)).breaks("relation")


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
    assert lost_at([0.0] * 25, at=36) is None
    assert lost_at([0.0] * 26, at=35) == 35


def test_a_correlation_that_nobody_recorded_is_not_lost():
    assert NOTHING.breaks("relation") is None


# --- what is read from a run ------------------------------------------------------------------------------------------


def rows(num_steps=60, n=8, **columns):
    """The sequences of some steps, n each in two groups; given are [num_steps, n], [n], [num_steps, 1] or one value."""
    place = np.arange(num_steps * n).reshape(num_steps, n)
    usual = {
        "step": place // n + 1, "group": place // (n // 2), "prompt": place // (n // 2),
        "whole": place, "ending": 0,
        "opening": place, "reference": np.nan, "length": 10.0,
    }  # fmt: skip
    given = {name: 0.0 for name in Rollouts.__dataclass_fields__} | usual | columns
    return Rollouts(**{name: np.broadcast_to(value, place.shape).ravel() for name, value in given.items()})


def by_step(values):
    return np.asarray(values, float).reshape(-1, 1)


def level(before, after, at=30):
    return np.where(at > STEPS, before, after)


def series(name, values):
    return Series(name, STEPS, np.asarray(values, float), "linear", "kind")


def test_columns_are_on_the_scale_that_they_are_looked_at_on():
    members = np.arange(8.0)
    found = read_moves(
        {name: series(name, np.full(60, 2.0)) for name in (
            "entropy", "mean_abs_d", "grad_norm", "length")}
        | {"reward": series("reward", level(0.0, 1.0))},
        rows(sampled=-1.0, likelihood=-2.0 - members, reference=-2.5, reward=members, advantage=-members),
        FALL,
    )  # fmt: skip
    assert (found.first, found.last) == (24, 35)
    assert {name: float(one.values[0]) for name, one in found.columns.items()} == pytest.approx({
        "entropy": np.log(2), "mean_abs_d": np.log(2), "grad_norm": np.log(2), "length": np.log(2),
        "reward": 0.0, "sampled": -1.0, "trained": -5.5, "relation": -1.0,
    })  # fmt: skip
    least = {name: one.least for name, one in found.columns.items()}
    assert least == pytest.approx({
        "entropy": 0.05, "mean_abs_d": 0.3, "grad_norm": 0.05, "length": 0.01,
        "reward": 0.02 * np.std(level(0.0, 1.0)), "sampled": 0.005, "trained": 0.005, "relation": 0.05,
    })  # fmt: skip


def test_values_that_were_not_recorded_are_left_out_of_a_column():
    values = np.where(STEPS % 2, 1.0, np.nan)
    found = read_moves({"entropy": series("entropy", values)}, rows(), FALL)
    assert found.columns["entropy"].steps.tolist() == STEPS[::2].tolist()
    assert not len(found.columns["relation"].steps)
    assert "grad_norm" not in found.columns


def test_a_correlation_by_step_is_of_all_its_groups_and_of_steps_with_a_spread():
    likelihood = np.array([1.0, 2, 3, 4, 0, 0, 0, 0])
    rewards = np.array([[1.0, 2, 3, 4, 7, 7, 7, 7], [4, 3, 2, 1, 7, 7, 7, 7], [5] * 8, [1, 0, 0, 1, 0, 0, 0, 0]])
    steps, found = relation_by_step(rows(4, likelihood=likelihood, reward=rewards), "likelihood", "reward")
    assert steps.tolist() == [1, 2, 4]
    assert found == pytest.approx([1.0, -1.0, 0.0])


def test_a_group_s_level_is_no_part_of_a_correlation():
    likelihood = np.array([1.0, 2, 1, 2, 101, 102, 101, 102])
    rewards = np.array([2.0, 1, 2, 1, 52, 51, 52, 51])
    _, found = relation_by_step(rows(1, likelihood=likelihood, reward=rewards), "likelihood", "reward")
    assert found == pytest.approx([-1.0])


def test_responses_without_a_reward_or_a_logprob_are_left_out_of_a_correlation():
    likelihood = np.array([1.0, 2, 3, 2, 5, 6, 7, np.nan])
    rewards = np.array([1.0, 2, 3, np.nan, 1, 2, 3, 2])
    _, found = relation_by_step(rows(1, likelihood=likelihood, reward=rewards), "likelihood", "reward")
    assert found == pytest.approx([1.0])


# --- the order of moves -----------------------------------------------------------------------------------------------


def facts(**given):
    """Facts of a run that fell at step 30, of which nothing else is known."""
    usual = {
        "trace": "run", "fall": FALL, "steps": STEPS, "moves": NOTHING, "clear": lambda *kinds: [],
        "rollouts": rows(), "series": {}, "mismatch": None, "changes": {}, "pays_length": 0.0, "pays_length_since": 0.0,
        "advantages_break": None, "still_engine": None, "checked": None, "changed_rewards": None,
        "earlier_weights": None,
    }  # fmt: skip
    found = SimpleNamespace(**usual | given)
    found.values = lambda name: np.asarray(found.series.get(name, np.full(len(STEPS), np.nan)), float)
    return found


def moved(**at):
    """Moves of quantities at steps: up, or down where the step is negative."""
    return moves_of(**{name: steady(abs(step), np.sign(step) * 9.0) for name, step in at.items()})


WITH_REFERENCE = rows(reference=-1.0)


# --- a loss that follows entropy or distance --------------------------------------------------------------------------

SINCE = STEPS >= 26
"""From where a fall whose interval begins at step 29 is looked at."""


def following(size, *, with_entropy=0.0, with_distance=0.0, **given):
    """A loss of size 1, and since the fall one that goes with entropy and distance, to these correlations."""
    draws = np.linalg.qr(np.c_[np.ones(35), np.random.default_rng(3).normal(size=(35, 3))])[0][:, 1:].T * np.sqrt(35)
    of_entropy, of_distance, rest = (np.r_[np.zeros(25), draw] for draw in draws)
    left = np.sqrt(max(1 - with_entropy**2 - with_distance**2, 0.0))
    since = size * (with_entropy * of_entropy + with_distance * of_distance + left * rest)
    before = np.where(np.arange(60) % 2, 1.0, -1.0)
    before[:25] /= before[:25].std()
    moves = moves_of(
        loss=Quantity(STEPS, np.where(SINCE, since, before), 0.02), entropy=Quantity(STEPS, np.log(10 + of_entropy), 0.05),
        distance=Quantity(STEPS, of_distance, 0.005),
    )  # fmt: skip
    return facts(moves=moves, **given)


# --- a term in the advantages -----------------------------------------------------------------------------------------


def going(now, usual=0.0, *, name="leaves", at=30, follows=0.1, **given):
    """Advantages that go with a quantity since a fall, and with rewards as far as `follows`."""
    columns = {
        name: Quantity(STEPS, level(usual, now, at), 0.05),
        "follows": Quantity(STEPS, level(0.9, follows, at), 0.05),
    }
    return facts(moves=moves_of(**columns), rollouts=WITH_REFERENCE, **given)


# --- how responses end ------------------------------------------------------------------------------------------------


def ending(num_other, *, at=30, a_step=20, usual_other=0, token=None, length=5.0, known_before=0):
    """Rollouts that end with token 0, of which some end otherwise from a step on; lengths were 10."""
    place = np.arange(60 * a_step).reshape(60, a_step)
    row, step = place % a_step, place // a_step + 1
    is_other = row < np.where(step >= at, num_other, usual_other)
    is_known = place < known_before
    ends = np.where(is_other, 1000 + place if token is None else token, np.where(is_known, 7, 0))
    return rows(60, a_step, ending=ends, length=np.where(is_other & (step >= at), length, 10.0))


# --- rewards that move alone ------------------------------------------------------------------------------------------


def relation_lost(at):
    values = level(0.8, 0.0, at)
    return Quantity(STEPS, values, 0.05)


def rewards_and(lost=None, **at):
    """Moves of quantities at steps, and a relation of likelihood and reward that is lost at another."""
    columns = {"sampled": Quantity(STEPS, np.zeros(len(STEPS)), 0.005), **moved(**at).columns}
    return moves_of(**columns if lost is None else columns | {"relation": relation_lost(lost)})


# --- rows -------------------------------------------------------------------------------------------------------------

MEMBERS = 4


def ordered_rewards(change, steps=40):
    """Responses that come again and earn what they are, in an order that `change` makes of what each step's earned."""
    draw = np.random.default_rng(0)
    whole = draw.integers(0, 40, (steps, 5 * MEMBERS))
    length = whole * 7 % 13 + 5
    earned = (np.arange(40) * 7 % 11).astype(float)[whole]
    reward_ = np.stack([change(earned, place, length[place]) for place in range(steps)])
    return rows(
        steps,
        5 * MEMBERS,
        whole=whole,
        length=length,
        reward=reward_,
        group=np.arange(steps * 20).reshape(steps, 20) // MEMBERS,
    )


def shortest_first(earned, place, length):
    return earned[place][np.argsort(length, kind="stable")]


def longest_first(earned, place, length):
    return earned[place][np.argsort(-length, kind="stable")]


def next_in_groups(earned, place, length):
    return np.roll(earned[place].reshape(-1, MEMBERS), -1, axis=1).ravel()


def previous_in_groups(earned, place, length):
    return np.roll(earned[place].reshape(-1, MEMBERS), 1, axis=1).ravel()


def halves(earned, place, length):
    return np.roll(earned[place], 10)


def last_step(earned, place, length):
    return earned[max(place - 1, 0)]


def test_halves_that_change_places_are_another_order_where_no_shift_is_as_near():
    found = repeated_responses(ordered_rewards(halves))
    assert (found.order, found.lies_off, found.unequal_ordered) == (
        "rewards shifted by -10 rows within the step",
        True,
        0.0,
    )


def mismatched(size, *, usual=0.0, apart=0.01, at=30, **given):
    """A run whose mismatch has a size from a step on, and whose trainer scores rows as others were sampled."""
    place = np.arange(60 * 8).reshape(60, 8)
    sampled = -1 - apart * (place % 8) - place // 8
    likelihood = np.where(place // 8 + 1 >= at, np.roll(sampled, 1, axis=1), sampled)
    rollouts = rows(sampled=sampled, likelihood=likelihood)
    values = level(usual, size, at)
    return facts(
        rollouts=rollouts, series={"mean_abs_d": values},
        mismatch=size, **given
    )  # fmt: skip


@pytest.mark.parametrize(("before", "step"), [(0.0049, 30), (0.0051, 20)])
def test_a_mismatch_has_begun_from_a_tenth_of_it_on(monkeypatch, before, step):
    asked = []
    monkeypatch.setattr(
        "tim_trace.analysis.facts.mismatch.read_still_engine", lambda rollouts, first: asked.append(first)
    )
    found = mismatched(0.05)
    found.series["mean_abs_d"] = np.where((STEPS >= 20) & (STEPS < 30), before, found.series["mean_abs_d"])
    assert Facts.still_engine.func(found) is None
    assert asked == [step]


# --- advantages -------------------------------------------------------------------------------------------------------


def given_change(series_, kind, step=30, *, before=1.0, after=2.0, size_in_sd=20.0, shape="shift", high=None):
    return RecordedChange(
        series=series_, kind=kind, step=step, low=step, high=step if high is None else high, before=before, after=after,
        size_in_sd=size_in_sd, shape=shape,
    )  # fmt: skip


def broken(since, *, before=0.9, at=30, back_at=None):
    """Correlations of advantages and rewards within groups, step by step; the step of a break and both."""
    members = np.array([1.0, -1, 1, -1, 1, -1, 1, -1])
    other = np.array([1.0, 1, -1, -1, 1, 1, -1, -1])
    follows = level(before, since, at)
    follows = follows if back_at is None else np.where(back_at <= STEPS, before, follows)
    given = follows.reshape(-1, 1) * members + np.sqrt(1 - follows.reshape(-1, 1) ** 2) * other
    return Facts.advantages_break.func(facts(rollouts=rows(reward=members, advantage=given)))


@pytest.mark.parametrize(("before", "since", "is_broken"), [
    (0.69, 0.0, False), (0.71, 0.0, True), (0.9, 0.29, True), (0.9, 0.31, False), (0.9, -0.9, True),
])  # fmt: skip
def test_advantages_break_from_seven_tenths_to_less_than_three(before, since, is_broken):
    found = broken(since, before=before)
    assert found == (30 if is_broken else None)


@pytest.mark.parametrize(("at", "step"), [(3, None), (4, 4), (20, 20), (35, 35), (36, None)])
def test_advantages_break_before_the_fall_is_there(at, step):
    found = broken(0.0, at=at)
    assert found == step


@pytest.mark.parametrize(("back_at", "is_broken"), [(25, False), (26, True)])
def test_most_steps_until_the_fall_are_without_the_advantages_that_broke(back_at, is_broken):
    """Advantages that followed until step 14, and again from `back_at` on; the fall is there at step 35."""
    assert (broken(0.0, at=15, back_at=back_at) is not None) == is_broken


@pytest.mark.parametrize(
    ("relation_step", "advantages_step", "step"),
    [(20, 25, 20), (25, 20, 20), (None, 20, 20), (25, None, 25), (None, None, 30)],
)
def test_what_a_fall_may_follow_breaks_first(relation_step, advantages_step, step):
    moves = NOTHING if relation_step is None else moves_of(relation=relation_lost(relation_step))
    assert Facts.breaks.func(facts(moves=moves, advantages_break=advantages_step)) == step


def test_where_nothing_fell_everything_since_the_start_is_since_then():
    assert Facts.breaks.func(facts(fall=None)) == 1
    assert Facts.breaks.func(facts(fall=None, steps=np.empty(0))) == 0


@pytest.mark.parametrize(("begins", "until"), [(20, 19), (21, 11)])
def test_what_a_run_was_before_its_fall_is_told_of_half_of_twenty_steps(begins, until):
    """Steps 1 to 19 are fewer than twenty: all of them tell."""
    found = facts(breaks=begins)
    assert Facts.well_before.func(found).step.max() == until


# --- an engine that stands still --------------------------------------------------------------------------------------


def engine(*, moved_by=0.0, num_moved=0, trainer_moved=100, trainer_by=0.1, logprob=-1.0, apart=1, n=100, at=30):
    """Two steps with the same openings, of which engine or trainer give some another logprob the second time."""
    place = np.arange(2 * n).reshape(2, n) % n
    second = np.arange(2).reshape(2, 1) == 1
    return rows(
        2, n, step=np.array([[at], [at + apart]]), opening=place,
        opening_sampled=logprob - np.where(second & (place < num_moved), moved_by, 0.0),
        opening_trained=logprob - np.where(second & (place < trainer_moved), trainer_by, 0.0),
    )  # fmt: skip


@pytest.mark.parametrize(("num_moved", "trainer_moved", "explains"), [
    (0, 100, True), (50, 100, True), (51, 100, False), (0, 90, True), (0, 89, False), (100, 100, False),
])  # fmt: skip
def test_an_engine_stands_still_that_gives_half_of_the_openings_the_same_bits(num_moved, trainer_moved, explains):
    found = read_still_engine(engine(num_moved=num_moved, moved_by=0.1, trainer_moved=trainer_moved), 30)
    assert found == StillEngine(
        num_pairs=100, still=1 - num_moved / 100, of_trainer=pytest.approx(1 - trainer_moved / 100)
    )
    assert found.explains == explains


@pytest.mark.parametrize(("by", "still"), [(0.95e-7, 1.0), (1.05e-7, 0.0)])
def test_the_same_bits_are_equal_to_rounding(by, still):
    assert read_still_engine(engine(num_moved=100, moved_by=by), 30).still == still


@pytest.mark.parametrize(("n", "apart", "logprob", "first", "is_known"), [
    (4, 1, -1.0, 30, True), (3, 1, -1.0, 30, False), (4, 20, -1.0, 30, True), (4, 21, -1.0, 30, True),
    (4, 1, -1.05e-3, 30, True),
    (4, 1, -0.95e-3, 30, False), (4, 1, -1.0, 31, False),
])  # fmt: skip
def test_openings_that_come_again_soon_and_are_not_certain_tell_of_an_engine(n, apart, logprob, first, is_known):
    found = read_still_engine(engine(n=n, apart=apart, logprob=logprob), first)
    assert (found is not None) == is_known


def test_openings_that_come_again_late_tell_only_of_an_engine_that_stands_still():
    assert read_still_engine(engine(n=4, apart=21), 30) == StillEngine(num_pairs=4, still=1.0, of_trainer=0.0)
    assert read_still_engine(engine(n=4, apart=21, num_moved=4, moved_by=0.1), 30) is None


@pytest.mark.parametrize("name", ["opening_sampled", "opening_trained"])
def test_an_opening_that_one_side_is_certain_of_tells_nothing(name):
    assert read_still_engine(replace(engine(), **{name: np.full(200, -1e-4)}), 30) is None


def test_an_opening_that_comes_often_tells_by_each_next_time():
    """Of steps 10, 30, 31, 40 and 61 it is 30 and 31, and 31 and 40; the engine got new weights at step 40."""
    steps = by_step([10, 30, 31, 40, 61]).astype(int)
    found = read_still_engine(
        rows(
            5,
            4,
            step=steps,
            opening=np.arange(4),
            opening_sampled=by_step([-1.0, -2, -2, -3, -3]),
            opening_trained=by_step([-1.0, -2, -3, -4, -4]),
        ),
        30,
    )
    assert found == StillEngine(num_pairs=8, still=0.5, of_trainer=0.0)


# --- the same rewards in other rows -----------------------------------------------------------------------------------


def moved_rewards(rewards=None, *, unequal=0.5, **at):
    members = np.arange(8.0)
    found = facts(
        rollouts=rows(reward=members if rewards is None else rewards), moves=rewards_and(30, **at),
        repeated=RepeatedResponses(
            num_pairs=100, unequal=unequal, order="", unequal_ordered=unequal, mean_difference=1.0
        ),
    )  # fmt: skip
    return Facts.moved_rewards.func(found)


def test_the_same_rewards_lie_in_other_rows_where_the_relation_alone_is_lost():
    assert moved_rewards()["step"] == 30
    assert moved_rewards(entropy=28) is None
    assert moved_rewards(mean_abs_d=30) is None
    assert moved_rewards(reward=30) is not None
    assert moved_rewards(np.arange(8.0) + by_step(level(0.0, 5.0))) is None
    assert Facts.moved_rewards.func(facts()) is None


@pytest.mark.parametrize(("unequal", "is_told"), [(0.05, False), (0.051, True)])
def test_responses_that_earn_what_they_did_lie_in_their_rows(unequal, is_told):
    assert (moved_rewards(unequal=unequal) is not None) == is_told


# --- rewards that pay for length --------------------------------------------------------------------------------------

LENGTHS = np.repeat(np.arange(8.0), 10)


def explained(difference, length=LENGTHS, *, base=None, group=None):
    """Share of what one step's responses earn otherwise that their lengths explain."""
    base = np.zeros(len(length)) if base is None else base
    group = np.zeros(len(length), int) if group is None else group
    control = rows(1, len(length), reward=base, length=length, group=group)
    return explained_by_length(replace(control, reward=base + difference), control)


def noisy(signal, share):
    """Values of which a share of the variance goes with a signal, and the rest with nothing."""
    rest = np.tile(np.resize([1.0, -1.0], 10), 8)
    return np.sqrt(share) * (signal - signal.mean()) / signal.std() + np.sqrt(1 - share) * rest


@pytest.mark.parametrize("share", [0.6, 0.79, 0.81, 1.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("paid", [LENGTHS, LENGTHS**3, 1.0 * (LENGTHS > 3)])
def test_what_goes_up_or_down_with_length_is_explained_by_it(paid, sign, share):
    found, direction = explained(sign * noisy(paid, share))
    assert (found, direction) == (pytest.approx(share, abs=0.05), sign)  # adjusted for the number of lengths


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_goes_away_from_one_length_is_explained_by_it(sign):
    assert explained(sign * np.abs(LENGTHS - 3))[0] == pytest.approx(1.0)


def test_what_is_paid_beside_the_group_s_mean_is_a_matter_of_length():
    group = np.arange(80) // 8
    usual = np.array([0, 9, 3, 14, 7, 0, 3, 9, 7, 14])[group]
    length = usual + np.tile([-3.0, -3, -1, -1, 1, 1, 3, 3], 10)
    found, direction = explained(np.tile([-1.0, -1, -1, -1, 1, 1, 1, 1], 10), length, group=group)
    assert (found, direction) == (pytest.approx(0.8), 1.0)  # linear in the length beside the mean
    by_place, _ = explained(np.tile([-1.0, -1, -1, -1, 1, 1, 1, 1], 10), length)
    assert by_place < 0.7


def alike(of_level, of_length):
    """What right and wrong responses earn otherwise, and beyond that by their length."""
    base = np.tile(np.resize([0.0, 1.0], 10), 8)
    return explained(of_level * (base - 0.5) * 2 + of_length * (LENGTHS - LENGTHS.mean()) / LENGTHS.std(), base=base)


@pytest.mark.parametrize(("rest", "found"), [(0.099, 0.099), (0.101, 1.0)])
def test_among_responses_that_earned_alike_a_tenth_of_the_difference_is_asked_of_length(rest, found):
    assert alike(np.sqrt(1 - rest), np.sqrt(rest)) == (pytest.approx(found), 1.0)


def test_where_nothing_differs_or_lengths_are_one_length_explains_nothing():
    few = np.zeros(80)
    few[:4] = 1.0
    five = np.where(np.arange(80) < 5, 1.0, 0.0)
    assert explained(np.zeros(80)) == (0.0, 0.0)
    assert explained(few) == (0.0, 0.0)
    assert explained(five)[0] > 0
    assert explained(LENGTHS, np.full(80, 5.0)) == (0.0, 0.0)
    assert explained(np.arange(8.0), np.repeat([1.0, 2.0], 4)) == (0.0, 0.0)
    assert explained(np.arange(10.0), np.repeat([1.0, 2.0], 5))[0] > 0
    assert explained(np.full(80, 1.0)) == (0.0, 0.0)


def paid_since(monkeypatch, *, explained_=(0.0, 0.0), by_length=0.0, share=1.0, otherwise=0.0):
    module = "tim_trace.analysis.facts.relations"
    asked = []
    monkeypatch.setattr(
        f"{module}.explained_by_length", lambda since, before: asked.append((since, before)) or explained_
    )
    monkeypatch.setattr(f"{module}.pays_length_otherwise", lambda since, before: otherwise)
    found = ChangedResponses(
        step=30, num_responses=100, share=share, share_before=0.0, length_correlation=by_length,
    )  # fmt: skip
    paid = Facts.pays_length_since.func(facts(changed_rewards=found))
    ((since, before),) = asked
    assert (since.step.min(), before.step.max()) == (30, 29)
    return paid


@pytest.mark.parametrize(("given", "paid"), [
    ({"explained_": (0.79, 1.0)}, 0.0), ({"explained_": (0.81, 1.0)}, 0.9), ({"explained_": (0.81, -1.0)}, -0.9),
    ({"explained_": (0.81, 0.0)}, 0.0), ({"by_length": 0.79}, 0.0), ({"by_length": 0.81}, 0.81),
    ({"by_length": -0.81}, -0.81),
    ({"by_length": 0.81, "share": 0.89}, 0.0), ({"by_length": 0.81, "share": 0.91}, 0.81),
    ({"by_length": 0.979, "share": 0.89}, 0.0),
    ({"by_length": 0.981, "share": 0.89}, 0.981), ({"otherwise": 0.7, "share": 0.91}, 0.7),
    ({"otherwise": 0.7, "share": 0.89}, 0.0),
])  # fmt: skip
def test_equal_responses_that_earn_something_else_by_their_length(monkeypatch, given, paid):
    assert paid_since(monkeypatch, **given) == pytest.approx(paid)


def test_where_nothing_earns_something_else_no_length_is_paid():
    assert Facts.pays_length_since.func(facts()) == 0.0


# --- what was changed long before a fall ------------------------------------------------------------------------------


def earlier(monkeypatch, *changes, near=()):
    monkeypatch.setattr("tim_trace.analysis.attribution.run_facts.read_recorded", lambda *given: changes)
    found = Facts.earlier.func(facts(near=near, database=None, pair=None))
    return [(change.series, change.step) for change in found]


@pytest.mark.parametrize(("given", "is_told"), [
    ({}, True), ({"size_in_sd": 9.9}, False), ({"size_in_sd": -10.1}, True), ({"size_in_sd": None}, True),
    ({"shape": "ramp"}, False),
    ({"step": 7}, False), ({"step": 8}, True), ({"high": 29}, True), ({"high": 30}, False),
    ({"kind": "optimizer"}, False),
    ({"kind": "reference"}, False), ({"kind": "setting"}, True), ({"kind": "sampling"}, True),
])  # fmt: skip
def test_what_a_run_was_given_otherwise_for_certain_long_before_a_fall(monkeypatch, given, is_told):
    change = given_change(**{"series_": "prompt_length", "kind": "prompts", "step": 15} | given)
    assert earlier(monkeypatch, change) == ([("prompt_length", change.step)] if is_told else [])
    assert earlier(monkeypatch, change, near=(change,)) == []


def test_the_latest_change_of_a_series_counts_and_has_to_be_sure(monkeypatch):
    one, two = (given_change("prompt_length", "prompts", step) for step in (12, 20))
    assert earlier(monkeypatch, one, two) == [("prompt_length", 20)]
    assert earlier(monkeypatch, one, replace(two, size_in_sd=5.0)) == []
    assert Facts.earlier.func(facts(fall=None)) == ()


# --- a fall that nobody sees ------------------------------------------------------------------------------------------


def steps_of(monkeypatch, *changes, ending_=None, **given):
    monkeypatch.setattr(silent, "read_recorded", lambda *args: changes)
    monkeypatch.setattr(silent, "ending_step", lambda rollouts: ending_)
    return list(silent.broken_steps(facts(database=None, pair=None, fall=None, **given)))


@pytest.mark.parametrize(("change", "is_told"), [
    (given_change("prompt_length", "prompts"), True), (given_change("temperature", "sampling"), True),
    (given_change("advantage_scale", "advantages"), True), (given_change("clip", "setting", size_in_sd=None), True),
    (given_change("dtype", "contract", size_in_sd=None), True), (given_change("entropy", "entropy"), False),
    (given_change("grad_norm", "optimizer"), False), (given_change("prompt_length", "prompts", size_in_sd=9.9), False),
    (given_change("prompt_length", "prompts", size_in_sd=-10.1), True),
    (given_change("prompt_length", "prompts", shape="ramp"), False),
    (given_change("mean_abs_d", "mismatch", after=0.0099), False),
    (given_change("mean_abs_d", "mismatch", after=0.0101), True),
    (given_change("max_abs_d", "mismatch", after=0.5), False),
])  # fmt: skip
def test_a_fall_is_supposed_where_a_run_was_given_something_else(monkeypatch, change, is_told):
    assert steps_of(monkeypatch, change) == ([30] if is_told else [])


def test_a_fall_is_supposed_where_responses_rewards_or_lags_become_others(monkeypatch):
    of_reward = SimpleNamespace(step=40)
    assert steps_of(monkeypatch, ending_=20, changed_rewards=of_reward) == [20, 40]
    lag = np.where(STEPS < 33, 0.0, np.where(STEPS < 50, 1.0, 4.0))
    assert steps_of(monkeypatch, series={"version_lag": lag}) == [33]
    assert steps_of(monkeypatch, series={"version_lag": 0.9 * lag}) == [50]
    assert steps_of(monkeypatch, series={"version_lag": np.ones(60)}) == []


def outcome(values):
    return Outcome(name="reward", steps=np.arange(len(values)), values=np.asarray(values, float), is_evaluation=False)


def test_a_supposed_fall_has_its_onset_at_the_step():
    read = Facts(
        trace="run", series={"mean_abs_d": series("mean_abs_d", level(0.0, 0.5))},
        outcomes=(outcome([0.0]),), fall=None,
        mismatch=None, checked=None, database=None, pair=("train", "rollout"), settings={}, notes=(),
    )  # fmt: skip
    found = silent.supposed_at(read, 30)
    assert (found.fall.step, found.fall.low, found.fall.high, found.fall.interval, found.fall.fallen) == (
        30,
        30,
        31,
        (29, 31),
        33,
    )
    assert (found.fall.outcome, found.mismatch) == ("reward", 0.5)


# --- a fall beyond the noise of what was before it --------------------------------------------------------------------


def is_beyond(values, least=0.01):
    values = np.asarray(values, float)
    width = max(3, len(values) // 10)
    means = _means(values, width)
    best = int(np.argmax(means[: len(means) - width + 1]))
    return _is_beyond_what_was(outcome(values), means, best, width, least)


def steady_then(lost, *, num_before, num=100, swing=0.02):
    """Values that scatter around 1, of which the last ten are the best, and then have lost so many of their errors."""
    until = 1 + swing * np.random.default_rng(5).normal(size=num_before)
    until[-10:] += 1.0
    return np.r_[until, np.full(num - num_before, until[-10:].mean() - lost * level_deviation(until) / np.sqrt(10))]


CHOSEN = np.sqrt(2 * np.log(10))
"""Errors by which the best of ten windows lies above the mean of all."""


@pytest.mark.parametrize(("num_before", "errors"), [(39, 2 * (6 + CHOSEN)), (40, 6 + CHOSEN), (60, 6 + CHOSEN)])
@pytest.mark.parametrize(("factor", "falls"), [(0.99, False), (1.01, True)])
def test_a_fall_is_six_errors_beyond_the_noise_of_what_was_before_it(num_before, errors, factor, falls):
    assert is_beyond(steady_then(factor * errors, num_before=num_before)) == falls


@pytest.mark.parametrize(("num_before", "is_known"), [(19, False), (20, True)])
def test_two_windows_tell_the_noise_before_a_fall(num_before, is_known):
    assert is_beyond(steady_then(100, num_before=num_before)) == is_known


@pytest.mark.parametrize(("least", "falls"), [(0.49, True), (0.51, False)])
def test_a_fall_beyond_noise_loses_enough(least, falls):
    assert is_beyond(dipping(0), least) == falls


def dipping(num_back, *, at=65):
    """Values of 1 that are 0.5 from the fiftieth on; some of them are 1 again."""
    values = np.r_[1 + 1e-6 * np.cos(np.arange(50) * 2.0), np.full(50, 0.5)]
    values[at : at + num_back] = 0.9999
    return values


@pytest.mark.parametrize(("num_back", "falls"), [(0, True), (7, True), (8, False)])
def test_nine_of_ten_windows_since_a_fall_beyond_noise_have_lost_it(num_back, falls):
    """Of 45 windows of ten values 4 are back where seven values are, and 5 where eight are."""
    assert is_beyond(dipping(num_back)) == falls


@pytest.mark.parametrize(("lost", "falls"), [(0.34, False), (0.36, True)])
def test_a_window_since_a_fall_is_low_that_has_lost_a_good_part(lost, falls):
    """Six of 45 windows have lost a share of the fall."""
    values = dipping(0)
    values[65:80] = 1 - lost * 0.5
    assert is_beyond(values) == falls


@pytest.mark.parametrize(("num_back", "falls"), [(0, True), (19, False)])
def test_the_last_fifth_has_lost_what_the_last_tenth_has(num_back, falls):
    assert is_beyond(dipping(num_back, at=71), 0.3) == falls


# --- what would be the cause all the same -----------------------------------------------------------------------------


def attribution(probability, *, code="truncation", **given):
    first, second = (Suspect(code=each, evidence=(), probability=share, next="") for each, share in (
        (code, probability), ("data", 1 - probability)))  # fmt: skip
    change = SupposedCause(suspects=(first, second), step=30)
    usual = {
        "trace": "run", "control": None, "kind": "observation", "num_steps": 60, "outcome": "reward", "fall": None,
        "changes": (), "suspects": (), "supposed": change,
    }  # fmt: skip
    return Attribution(**usual | given)


@pytest.mark.parametrize(
    ("probability", "code", "is_told"),
    [(0.5, "truncation", False), (0.51, "truncation", True), (0.9, "unknown", False)],
)
def test_a_supposed_cause_is_more_probable_than_all_others(probability, code, is_told):
    found = attribution(probability, code=code)
    assert (found.supposed_cause is found.supposed) == is_told
    assert ("If an evaluation does show a drop" in verdict_sentence(found)) == is_told
    assert verdict_sentence(found).startswith("No collapse detected: reward shows no lasting drop beyond noise")
    assert found.cause is None


def test_a_supposed_cause_is_told_with_its_step_and_probability():
    found = attribution(0.73)
    title = found.supposed.suspects[0].title
    expected = f"the most likely cause is {title} (73%), starting at step 30."
    assert verdict_sentence(found).endswith(expected)
    assert title in attribution_text(found)
    assert result_json(found)["supposed"]["step"] == 30
    assert attribution(0.73, supposed=None).supposed_cause is None


def record(path, tokens_of):
    """A run of 40 steps that earns the same all along; `tokens_of` gives the ids of a response."""
    with Recorder(path) as recorder:
        for step in range(1, 41):
            chance = np.random.default_rng(step)
            kind = chance.integers(10, 30, 16)
            ids = [tokens_of(step, row, int(token)) for row, token in enumerate(kind)]
            rewards = (kind % 2).astype(float)
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[100 + step % 5 * 4 + row // 4] for row in range(16)], response_ids=ids,
                group_ids=[str(row // 4) for row in range(16)], policy_version=step - 1, reward=rewards,
                advantage=rewards - np.repeat(rewards.reshape(4, 4).mean(1), 4),
            )  # fmt: skip
            logprobs = [[-0.5 - 0.1 * (sum(row) * 7 % 5)] * len(row) for row in ids]
            for name in ("rollout", "train"):
                recorder.add_scores(name, batch, logprobs=logprobs, policy_version=step - 1)
    return path


def test_responses_that_are_broken_off_are_told_where_no_reward_shows_it(tmp_path):
    def broken_off(step, row, token):
        return [token, 5, 6, 7, 8, 2] if step < 20 or row % 3 else [token, 5, 30 + row]

    found = attribute(record(tmp_path / "run", broken_off))
    assert (found.fall, found.cause) == (None, None)
    assert (found.supposed_cause.step, found.supposed_cause.suspects[0].code) == (20, "truncation")
    assert "If an evaluation does show a drop" in verdict_sentence(found)


def test_of_a_run_in_which_nothing_was_changed_nothing_is_supposed(tmp_path):
    found = attribute(record(tmp_path / "run", lambda step, row, token: [token, 5, 6, 7, 8, 2]))
    assert (found.fall, found.supposed) == (None, None)
    assert "If an evaluation does show a drop" not in verdict_sentence(found)
