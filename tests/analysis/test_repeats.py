"""What equal openings, responses and prompts prove of one run: engines with earlier weights or noise, rewards, limits, new prompts."""

from types import SimpleNamespace

import numpy as np
import pytest
from tim_trace import Recorder
from tim_trace.analysis.attribution.run_facts import Facts
from tim_trace.analysis.facts.changes import NOTHING, Moves, Quantity
from tim_trace.analysis.facts.conditions import read_conditions
from tim_trace.analysis.facts.mismatch import EarlierWeights, read_earlier_weights
from tim_trace.analysis.facts.other_rows import ScoredRows, scored_rows
from tim_trace.analysis.facts.recorded import read_recorded
from tim_trace.analysis.facts.relations import changed_responses, explained_by_length_by_step
from tim_trace.analysis.facts.rollouts import Rollouts, read_rollouts, unequal_in_step, unequal_openings, unequal_share
from tim_trace.analysis.facts.series import Fall
from tim_trace.analysis.views import open_database

# The functions of the package hide its modules of the same names.

CERTAIN = 7.0
STEPS = np.arange(1, 61)
FALL = Fall(
    outcome="reward", onset_of="reward", kind="collapse", step=31, low=30, high=32, interval=(29, 33), fallen=35,
    before=0.8, after=0.3, size_in_sd=9.0,
)  # fmt: skip


def rows(num_steps=60, n=8, **columns):
    """The sequences of some steps, n each in one group; given are [num_steps, n], [n], [num_steps, 1] or one value."""
    place = np.arange(num_steps * n).reshape(num_steps, n)
    usual = {
        "step": place // n + 1,
        "group": place // n,
        "prompt": place,
        "response": place,
        "whole": place,
        "opening": place,
    }
    given = {name: 0.0 for name in Rollouts.__dataclass_fields__} | usual | {"length": 10.0} | columns
    return Rollouts(**{name: np.broadcast_to(value, place.shape).ravel() for name, value in given.items()})


def facts(**given):
    usual = {
        "fall": FALL, "steps": STEPS, "moves": NOTHING, "series": {}, "mismatch": SimpleNamespace(size=0.2), "checked": None,
        "scored_rows": None, "still_engine": None, "earlier_weights": None, "disagreeing": (0.0, 0.0),
    }  # fmt: skip
    found = SimpleNamespace(**usual | given)
    found.values = lambda name: np.asarray(found.series.get(name, np.full(len(STEPS), np.nan)), float)
    return found


def codes(evidence):
    return {each.code: each.points for each in evidence}


# --- an engine with weights that the trainer had before ----------------------------------------------------------------

BEGINS = 31
OPENINGS = np.arange(8)
SCORED = -1.0 - 0.01 * STEPS[:, None] - 0.1 * OPENINGS
"""Logprobs of eight openings that come at every step: no two are equal."""


def sampled_by(version, rows_off=8):
    """The engine's logprobs, of the step's own weights until BEGINS, of `version(step)` since; of some rows alone."""
    at = np.array([version(step) if step >= BEGINS else step for step in STEPS])
    sampled = SCORED.copy()
    sampled[:, :rows_off] = SCORED[at - 1][:, :rows_off]
    return rows(opening=OPENINGS, opening_sampled=sampled, opening_trained=SCORED)


def test_of_a_long_run_openings_are_left_out_evenly(monkeypatch):
    monkeypatch.setattr("tim_trace.analysis.facts.mismatch._MOST_HELD", 3000)
    earlier = read_earlier_weights(sampled_by(lambda step: 20), BEGINS)  # 8 openings x (30 + ... + 59) = 10,680
    assert (earlier.num_pairs, earlier.version, earlier.agreement) == (60, 20, 1.0)


@pytest.mark.parametrize(("num_equal", "by_chance", "agreement", "explains"), [
    (7, 0, 0.0, False), (8, 0, 0.0, True), (10, 2, 0.0, True), (9, 2, 0.0, False), (0, 0, 0.49, False), (0, 0, 0.5, True),
])  # fmt: skip
def test_from_where_on_earlier_weights_explain_a_mismatch(num_equal, by_chance, agreement, explains):
    found = EarlierWeights(
        num_pairs=99, num_equal=num_equal, by_chance=by_chance, version=9, is_distance=False, agreement=agreement,
        num_agreeing=40,
    )  # fmt: skip
    assert found.explains == explains


@pytest.mark.parametrize(("off", "num_equal"), [(0.9e-5, 240), (1.1e-5, 0)])
def test_equal_is_what_an_exact_engine_leaves(off, num_equal):
    run = sampled_by(lambda step: 20)
    moved = rows(opening=OPENINGS, opening_sampled=run.opening_sampled.reshape(60, 8) + off, opening_trained=SCORED)
    assert read_earlier_weights(moved, BEGINS).num_equal == num_equal


# --- a side that disagrees with itself ----------------------------------------------------------------------------------


def noisy(of_engine=0.0, of_trainer=0.0, n=8):
    """Steps of n equal openings, to a share of whose neighbours one side gives two logprobs."""

    def drawn(share):
        return -1.0 - 0.01 * np.cumsum(np.tile(np.arange(n) / n < share, (60, 1)), axis=1)

    return rows(n=n, opening=STEPS[:, None], opening_sampled=drawn(of_engine), opening_trained=drawn(of_trainer))


def test_equal_openings_of_a_step_are_held_against_each_other():
    assert unequal_openings(noisy()) == (0.0, 0.0)
    assert unequal_openings(noisy(of_engine=0.5)) == (pytest.approx(3 / 7), 0.0)
    assert unequal_openings(noisy(of_trainer=1.0)) == (0.0, 1.0)
    few = rows(num_steps=2, opening=np.arange(1, 3)[:, None], opening_sampled=-1.0, opening_trained=-1.0)
    assert np.isnan(unequal_openings(few)).all()  # 14 pairs


@pytest.mark.parametrize(("since", "before", "expected"), [
    (0.29, 0.0, (0.0, 0.0)), (0.3, 0.05, (0.3, 0.0)), (0.3, 0.06, (0.0, 0.0)), (0.3, np.nan, (0.3, 0.0)),
])  # fmt: skip
def test_noise_counts_from_a_third_on_that_was_not_there_before(monkeypatch, since, before, expected):
    of = iter([(since, 0.0), (before, 0.0)])
    monkeypatch.setattr("tim_trace.analysis.attribution.run_facts.unequal_openings", lambda part: next(of))
    monkeypatch.setattr("tim_trace.analysis.attribution.run_facts._mismatch_begins", lambda facts: 30)
    assert Facts.disagreeing.func(facts(rollouts=rows())) == expected


@pytest.mark.parametrize(("size", "expected"), [(0.029, (0.0, 0.0)), (0.031, (0.9, 0.0))])
def test_of_two_logprobs_of_one_opening_that_are_rounded_otherwise_no_noise_is_told(monkeypatch, size, expected):
    """A bf16 engine rounds by the shapes of its batches."""
    of = iter([(0.9, 0.0), (np.nan, np.nan)])
    monkeypatch.setattr("tim_trace.analysis.attribution.run_facts.unequal_openings", lambda part: next(of))
    monkeypatch.setattr("tim_trace.analysis.attribution.run_facts._mismatch_begins", lambda facts: 30)
    assert Facts.disagreeing.func(facts(rollouts=rows(), mismatch=SimpleNamespace(size=size))) == expected


# --- rewards of equal responses -------------------------------------------------------------------------------------------


def test_equal_responses_of_a_step_have_one_reward_or_two():
    twice = np.repeat(np.arange(240).reshape(60, 4), 2, axis=1)
    given = np.tile([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], (60, 1))
    assert unequal_in_step(rows(whole=twice, reward=given)) == (240, 0.25)
    assert unequal_in_step(rows(whole=twice, reward=np.repeat(given[:, ::2], 2, axis=1))) == (240, 0.0)
    num, share = unequal_in_step(rows(num_steps=4, whole=twice[:4], reward=given[:4]))
    assert num == 16
    assert np.isnan(share)


# --- logprobs of rows that lie beside each other ------------------------------------------------------------------------


def beside(num_fitting, num_alike=0, n=100):
    """Rows with logprobs of the row after: so many of them to the bit, and so many rows whose neighbours are all alike."""
    place = np.arange(60 * n).reshape(60, n)
    row = place % n
    sampled = np.where(row < num_alike, -0.5, -1 - place / 1e3)
    others = np.roll(sampled, 3, axis=1) - np.where(row < num_fitting, 0.0, 0.01 + row / 1e4)
    return rows(60, n, sampled=sampled, likelihood=np.where(STEPS[:, None] >= 30, others, sampled))


@pytest.mark.parametrize(("num_fitting", "is_moved"), [(100, True), (60, True), (30, False)])
def test_logprobs_that_are_those_of_one_row_beside_are_found(num_fitting, is_moved):
    assert scored_rows(beside(num_fitting), 30, 1e-5).explains == is_moved


@pytest.mark.parametrize(("share", "by_chance", "explains"), [
    (0.951, 0.5, True), (0.949, 0.5, False), (0.4, 0.16, True), (0.39, 0.0, False), (0.6, 0.3, False),
])  # fmt: skip
def test_of_a_certain_policy_nearly_all_rows_have_to_fit(share, by_chance, explains):
    assert ScoredRows(step=1, num_other=99, share=share, by_chance=by_chance).explains == explains


# --- beside a control ---------------------------------------------------------------------------------------------------


# --- limits ---------------------------------------------------------------------------------------------------------------


def limited(share, lengths, *, usual=0.0):
    values = np.where(STEPS >= 30, share, usual)
    run = rows(length=np.where(STEPS >= 30, lengths, 10.0)[:, None])
    return facts(series={"share_length_limited": values}, rollouts=run)


# --- updates and the loss ---------------------------------------------------------------------------------------------------


def losses(correlation, rise, size=0.2):
    """A loss that is above what it was by some standard deviations since step 26, and goes with the entropy to a correlation."""
    draws = np.linalg.qr(np.c_[np.ones(35), np.random.default_rng(3).normal(size=(35, 2))])[0][:, 1:].T * np.sqrt(35)
    of_entropy, rest = draws
    before = np.where(np.arange(25) % 2, 1.0, -1.0)
    before /= before.std()
    since = 4 * (correlation * of_entropy + np.sqrt(1 - correlation**2) * rest)
    since += rise - (np.median(since[:10]) - np.median(before[-10:]))
    entropy = np.r_[np.zeros(25), of_entropy]
    columns = {
        "loss": Quantity(STEPS, np.r_[before, since], 0.02), "entropy": Quantity(STEPS, np.log(10 + entropy), 0.05),
    }  # fmt: skip
    return facts(moves=Moves(columns=columns, first=24, last=35), mismatch=SimpleNamespace(size=size))


# --- prompts --------------------------------------------------------------------------------------------------------------


def record_prompts(path, prompts_of):
    draw = np.random.default_rng(0)
    with Recorder(path) as recorder:
        for step in range(1, 61):
            recorder.add_sequences(
                step=step,
                prompt_ids=prompts_of(step, draw),
                response_ids=draw.integers(1, 9, (32, 4)),
                reward=draw.random(32),
            )
    return open_database(path)


def marked(step, draw):
    """Prompts of a marker and three tokens; starting at step 40, a growing share has another marker."""
    share = max(step - 39, 0) / 10
    return np.c_[np.where(draw.random(32) < share, 5, 4), draw.integers(10, 14, (32, 3))]


def paired(step, draw):
    """Prompts of two tokens twice, in a different order starting at step 40: no token and no place is new."""
    a, b = draw.integers(10, 14, (2, 32))
    b = np.where(a == b, 10 + (b - 9) % 4, b)
    return np.c_[a, b, a, b] if step >= 40 else np.c_[a, b, b, a]


@pytest.mark.parametrize(
    ("prompts_of", "series", "low"), [(marked, "share_new_places", 40), (paired, "prompt_pattern_shift", 40)]
)
def test_prompts_with_a_new_token_at_a_place_or_other_places_alike_are_listed(tmp_path, prompts_of, series, low):
    found = read_recorded(record_prompts(tmp_path / "run", prompts_of), ("train", "rollout"))
    first = next(change for change in found if change.series == series)
    assert low <= first.step <= low + 4
    assert abs(first.size_in_sd) >= 4


def test_the_first_quarter_of_a_run_has_no_new_places(tmp_path):
    database = record_prompts(tmp_path / "run", marked)
    values = read_conditions(database)["share_new_places"].values
    assert np.isnan(values[:15]).all()
    assert (values[15:39] == 0).all()
    assert values[-1] == pytest.approx(2 / 8)  # the marker, from the front and from the end


# --- tool tokens ------------------------------------------------------------------------------------------------------------


def test_what_a_tool_wrote_is_no_part_of_a_response_s_likelihood(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1,
            response_ids=[[1, 2, 3, 4], [1, 2, 3, 4]],
            response_mask=[[1, 0, 0, 1], [1, 1, 1, 1]],
            reward=[0.0, 1.0],
        )
        recorder.add_scores("train", batch, logprobs=[[-1.0, -9.0, -9.0, -2.0], [-1.0, -2.0, -3.0, -4.0]])
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, 0.0, 0.0, -2.0], [-1.0, -2.0, -3.0, -4.0]])
    found = read_rollouts(open_database(tmp_path / "run"))
    assert found.likelihood.tolist() == found.sampled.tolist() == [-1.5, -2.5]
    assert found.length.tolist() == [2.0, 4.0]
    assert found.num_tokens.tolist() == [4.0, 4.0]


# --- a loss that counts other tokens, and rewards that are a matter of length -----------------------------------------------


def with_masks(num_masked, **columns):
    """Sixteen responses that come at every step, of which so many tokens do not count, [60, 1] or [60, 16]."""
    return rows(n=16, whole=np.arange(16), num_masked=num_masked, **columns)


def masks_of(rollouts, fall=FALL):
    found = SimpleNamespace(rollouts=rollouts, fall=fall, steps=STEPS)
    found._given_otherwise = lambda column, least: Facts._given_otherwise(found, column, least)
    return Facts.changed_masks.func(found)


def from_31(values):
    return np.where(STEPS[:, None] >= 31, values, 2.0)


def test_masks_that_differ_all_along_or_without_a_fall_are_no_change():
    assert masks_of(with_masks(np.tile([[2.0], [5.0]], (30, 1)))) is None
    assert masks_of(with_masks(from_31(5.0)), fall=None) is None


def test_a_reference_is_not_held_against_other_tokens_of_a_response():
    """The mean logprob of a response is over the tokens that count."""
    same = dict(n=16, whole=np.arange(16), reference=np.where(STEPS[:, None] >= 31, -2.0, -1.0))
    assert changed_responses(rows(**same), "reference", first=25, last=40, least=0.05).share == 1.0
    other = changed_responses(rows(**same, num_masked=from_31(5.0)), "reference", first=25, last=40, least=0.05)
    assert other.share == 0.0
    assert unequal_share(rows(**same), "reference", 0.05) > 0
    assert unequal_share(rows(**same, num_masked=from_31(5.0)), "reference", 0.05) == 0


LENGTHS = np.repeat([3.0, 5.0, 8.0, 9.0], 5)


def paid(share, n=20, lengths=LENGTHS, steps=60):
    """The share of the variance of the rewards that lengths explain at each step, of rewards that lengths make so."""
    draw = np.random.default_rng(0)
    of_length = lengths - lengths.mean()
    rest = draw.normal(size=(steps, n))
    inside = (lengths[:, None] == np.unique(lengths)) @ np.diag(1 / np.unique(lengths, return_counts=True)[1])
    rest = rest - rest @ inside @ (lengths[:, None] == np.unique(lengths)).T  # lengths say nothing of it
    rest *= np.sqrt((of_length**2).sum() / (rest**2).sum(axis=1, keepdims=True))
    rewards = np.sqrt(share) * of_length + np.sqrt(1 - share) * rest
    return explained_by_length_by_step(rows(steps, n, length=lengths, reward=rewards))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_that_lengths_explain_is_adjusted_for_their_number(share):
    steps, found = paid(share)
    assert steps.tolist() == STEPS.tolist()
    assert found == pytest.approx(1 - (1 - share) * 19 / 16)  # 20 rewards of 4 lengths


@pytest.mark.parametrize(("lengths", "is_judged"), [
    ([3.0] * 3 + [5.0] * 3 + [8.0] * 3, True), ([3.0] * 4 + [5.0] * 3 + [8.0] * 2, False), ([3.0] * 4 + [5.0] * 5, False),
])  # fmt: skip
def test_three_lengths_have_three_rewards_each(lengths, is_judged):
    rollouts = rows(60, 9, length=np.array(lengths), reward=np.arange(9.0))
    steps, share = explained_by_length_by_step(rollouts)
    assert (len(steps), len(share)) == ((60, 60) if is_judged else (0, 0))
    alike = rows(60, 9, length=np.array(lengths), reward=1.0)
    assert len(explained_by_length_by_step(alike)[0]) == 0


def test_rewards_are_held_against_lengths_until_fifteen_steps_after_the_fall(monkeypatch):
    late = FALL.latest + 15
    steps = np.r_[np.arange(6, 26), np.arange(late - 4, late + 6)]
    share = np.r_[np.full(20, 0.1), np.full(5, 0.95), np.full(5, 0.1)]
    monkeypatch.setattr(
        "tim_trace.analysis.attribution.run_facts.explained_by_length_by_step", lambda rollouts: (steps, share)
    )
    assert Facts.rewards_by_length.func(SimpleNamespace(fall=FALL, rollouts=None)) == pytest.approx((0.1, 0.95))
