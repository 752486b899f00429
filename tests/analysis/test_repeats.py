"""What equal openings, responses and prompts prove of one run: engines with earlier weights or noise, rewards, limits, new prompts."""

from types import SimpleNamespace

import numpy as np
import pytest
from tim_trace import Recorder
from tim_trace.analysis.facts.changes import NOTHING, Moves, Quantity
from tim_trace.analysis.facts.conditions import read_conditions
from tim_trace.analysis.facts.mismatch import EarlierWeights, read_earlier_weights
from tim_trace.analysis.facts.recorded import read_recorded
from tim_trace.analysis.facts.relations import changed_responses
from tim_trace.analysis.facts.rollouts import Rollouts, read_rollouts
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
        "whole": place,
        "opening": place,
    }
    given = {name: 0.0 for name in Rollouts.__dataclass_fields__} | usual | {"length": 10.0} | columns
    return Rollouts(**{name: np.broadcast_to(value, place.shape).ravel() for name, value in given.items()})


def facts(**given):
    usual = {
        "fall": FALL, "steps": STEPS, "moves": NOTHING, "series": {}, "mismatch": SimpleNamespace(size=0.2), "checked": None,
        "still_engine": None, "earlier_weights": None,
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
    assert (earlier.num_agreeing, earlier.version, earlier.agreement) == (60, 20, 1.0)


@pytest.mark.parametrize(("agreement", "explains"), [(0.49, False), (0.5, True)])
def test_from_where_on_earlier_weights_explain_a_mismatch(agreement, explains):
    found = EarlierWeights(version=9, is_distance=False, agreement=agreement, num_agreeing=40)
    assert found.explains == explains


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


@pytest.mark.parametrize(("prompts_of", "series", "low"), [(marked, "share_new_places", 40)])
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


def from_31(values):
    return np.where(STEPS[:, None] >= 31, values, 2.0)


def test_a_reference_is_not_held_against_other_tokens_of_a_response():
    """The mean logprob of a response is over the tokens that count."""
    same = dict(n=16, whole=np.arange(16), reference=np.where(STEPS[:, None] >= 31, -2.0, -1.0))
    assert changed_responses(rows(**same), "reference", first=25, last=40, least=0.05).share == 1.0
    other = changed_responses(rows(**same, num_masked=from_31(5.0)), "reference", first=25, last=40, least=0.05)
    assert other.share == 0.0


def test_a_reference_that_scores_repeated_openings_differently_was_changed():
    mean = np.where(np.arange(1, 61)[:, None] < 31, -1.0, -2.0) * np.ones((60, 20))
    run = rows(60, 20, opening=np.arange(20), opening_reference=mean, reference=np.nan)
    found = changed_responses(run, "opening_reference", first=10, last=50, least=0.05)
    assert (found.step, found.share) == (31, 1.0)
