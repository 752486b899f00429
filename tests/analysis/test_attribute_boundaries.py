"""What an attribution concludes just under and just over each of its thresholds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tim_trace.analysis.attribution import text
from tim_trace.analysis.attribution.attribution import SUSPECTS, Attribution, Evidence, Suspect
from tim_trace.analysis.attribution.settings import suspect_of
from tim_trace.analysis.attribution.text import (
    DIFFERENCES,
    EVIDENCE,
    NOTES,
    attribution_text,
    verdict_sentence,
)
from tim_trace.analysis.facts import changes as timeline
from tim_trace.analysis.facts import series as fall_module
from tim_trace.analysis.facts.changes import ChangePoint, with_onset
from tim_trace.analysis.facts.mismatch import read_mismatch_size
from tim_trace.analysis.facts.recorded import RecordedChange
from tim_trace.analysis.facts.series import Fall, Outcome, Series, _settled_above, find_fall, find_flat, refined

# The functions of the package hide its modules of the same names.

STEPS = np.arange(1, 101)
FALL = Fall(
    outcome="reward", onset_of="reward", kind="collapse", step=60, low=58, high=62, interval=(57, 63), fallen=65,
    before=0.8, after=0.3, size_in_sd=9.0,
)  # fmt: skip


def change(step, before=1.0, after=2.0, *, margin=0, size_in_sd=9.0):
    return ChangePoint(step, step - margin, step + margin, before, after, size_in_sd, 0.0)


# --- the verdict ------------------------------------------------------------------------------------------------------


def attribution(*suspects, **given):
    return Attribution(
        **{
            "trace": "run", "control": None, "kind": "observation", "num_steps": 100, "outcome": "reward", "fall": FALL,
            "changes": (), "suspects": suspects,
        } | given
    )  # fmt: skip


def suspect(code, probability, detail=""):
    return Suspect(code=code, probability=probability, detail=detail)


@pytest.mark.parametrize(
    ("first", "cause"), [(suspect("reward", 0.5), None), (suspect("reward", 0.501), "reward"), (suspect("unknown", 0.9), None)]
)  # fmt: skip
def test_a_cause_is_more_probable_than_all_others(first, cause):
    assert attribution(first, suspect("mismatch", 0.1)).cause == cause


@pytest.mark.parametrize(("probability", "clears"), [(0.05, False), (0.0499, True)])
def test_the_mismatch_is_cleared_below_a_twentieth(probability, clears):
    assert attribution(suspect("reward", 0.9), suspect("mismatch", probability)).clears_mismatch == clears


PRIOR = Evidence(code="prior", points=2.5)


def test_the_verdict_in_words():
    where = "reward collapses from 0.8 to 0.3 after step 60 (95% CI 57-63). "
    told = attribution(suspect("reward", 0.9), suspect("mismatch", 0.01))
    assert verdict_sentence(told) == where + (
        "Most likely cause: noisy or wrong rewards or labels (90%, from this run alone). The mismatch is not the cause."
    )
    open_ = attribution(suspect("mismatch", 0.4, "temperature"), suspect("length", 0.3), control="other")
    assert verdict_sentence(open_) == where + (
        "Cause unknown. Most likely of those tested: training-inference mismatch (40%): temperature on one "
        "side only; response length (30%), compared with another run."
    )
    unknown = attribution(suspect("unknown", 0.7), suspect("length", 0.2), suspect("reward", 0.1))
    assert verdict_sentence(unknown) == where + (
        "Cause unknown. Probably none of the causes tested (70%); the likeliest of them is response length (20%), from this run alone."
    )
    assert (open_.cause, open_.first_suspect.code) == (None, "mismatch")
    assert (unknown.cause, unknown.first_suspect.code) == (None, "length")
    assert (told.cause, told.first_suspect.code) == ("reward", "reward")
    assert attribution(suspect("unknown", 0.95), suspect("length", 0.0499)).first_suspect is None
    assert attribution(suspect("unknown", 0.95), suspect("length", 0.05)).first_suspect.code == "length"
    assert verdict_sentence(attribution(suspect("unknown", 0.98), suspect("length", 0.02))) == where + (
        "Cause unknown. Probably none of the causes tested (98%), from this run alone."
    )
    seen = Evidence(code="rewards_changed", points=7.0, values={"step": 40, "share": 1.0, "num_responses": 70})
    for evidence in ((seen, PRIOR), (PRIOR, seen)):
        counted = attribution(replace(suspect("unknown", 0.98), evidence=evidence), suspect("length", 0.02))
        assert verdict_sentence(counted) == where + (
            "Cause unknown. Probably none of the causes tested (98%): 100% of 70 responses sampled "
            "both before and after step 40 get a different reward after that step, from this run alone."
        )
    sure = attribution(suspect("entropy", 0.99), kind="intervention", control="other")
    assert (
        "Most likely cause: entropy collapse or explosion (99%, compared with a same-seed baseline)"
        in verdict_sentence(sure)
    )
    assert verdict_sentence(attribution(fall=None)).startswith("No collapse detected: reward shows no lasting drop")
    assert verdict_sentence(attribution(outcome="", fall=None)).startswith("Cannot detect a collapse")


def test_text_marks_what_speaks_for_and_against():
    evidence = tuple(Evidence(code="declared_fresh", points=points) for points in (1.0, -1.0, 0.0))
    likely, hardly = Suspect(code="length", probability=0.0196, evidence=evidence), suspect("reward", 0.0194)
    text = attribution_text(attribution(likely, hardly))
    assert [line.split()[0] for line in text.splitlines() if "recorded policy versions" in line] == [
        "for",
        "against",
        "neutral",
    ]
    assert "Unlikely (<2%): noisy or wrong rewards or labels 1.9%" in text
    assert "response length (2%)" in text


def test_neither_the_cause_s_series_nor_the_outcome_is_a_consequence():
    changes = tuple(
        RecordedChange(
            series=name, kind="mismatch", step=60, low=60, high=60, before=0.1, after=0.9, size_in_sd=9.0, follows="length"
        )
        for name in ("mean_abs_d", "reward", "k3_positive")
    )  # fmt: skip
    text = attribution_text(attribution(suspect("mismatch", 0.94), changes=changes))
    listed, followed = text[text.index("Changes around") : text.index("Suspects")].split("consequences: ")
    assert followed.strip() == "k3_positive"
    assert all(name in listed for name in ("mean_abs_d", "reward"))


# --- a fall -----------------------------------------------------------------------------------------------------------


def outcome(values):
    return Outcome(name="reward", steps=np.arange(1, len(values) + 1), values=np.asarray(values), is_evaluation=False)


def noisy(values, scale, seed=1):
    return values + scale * np.random.default_rng(seed).normal(size=len(values))


@pytest.mark.parametrize(("lost", "falls"), [(0.085, False), (0.095, True)])
def test_a_fall_loses_nine_hundredths(lost, falls):
    values = noisy(np.where(STEPS < 50, 1.0, 1.0 - lost), 1e-4)
    assert (find_fall(outcome(values)) is not None) == falls


@pytest.mark.parametrize(("num_below", "passes"), [(60, False), (59, True)])
def test_a_dip_that_passes_is_no_fall(num_below, passes):
    # Six in ten of what follows the first window below the middle have to be below, too.
    means = np.repeat([1.0, 0.0, 1.0], [20, num_below, 100 - num_below])
    assert _settled_above(means, 0, 1.0, 0.0) == passes


@pytest.mark.parametrize(("scale", "falls"), [(0.99, True), (1.01, False)])
def test_a_fall_is_larger_than_its_noise(monkeypatch, scale, falls):
    # 3 sqrt(2) standard errors of a mean of 10 values beyond sqrt(2 ln 10), for the best of ten windows.
    noise = scale * 0.5 * np.sqrt(10) / (3 * np.sqrt(2) + np.sqrt(2 * np.log(10)))
    monkeypatch.setattr(fall_module, "level_deviation", lambda values: noise)
    monkeypatch.setattr(fall_module, "_slope_in_sd", lambda values, noise: 0.0)
    monkeypatch.setattr(fall_module, "_is_beyond_what_was", lambda *given: False)
    assert (find_fall(outcome(np.where(STEPS < 50, 1.0, 0.5))) is not None) == falls


@pytest.mark.parametrize("num_values", [5, 8, 12, 20])
def test_an_evaluation_falls_even_if_it_scatters_more_at_the_end_than_it_lost(num_values):
    # 0.86 to 0.57 with a scatter of 0.02 before and of 0.15 after, which is half of the loss.
    swings = np.resize([0.2, -0.1, -0.15, 0.15, -0.1], num_values - num_values // 2)
    before = 0.86 + np.resize([0.01, -0.02, 0.02, -0.01], num_values // 2)
    found = find_fall(outcome(np.concatenate([before, 0.57 + swings])))
    assert (found is not None) == (num_values > 5)
    # As much scatter all along is no fall.
    assert find_fall(outcome(0.75 + np.resize([0.2, -0.15, 0.1, -0.2, 0.05], num_values))) is None


def learning(ends, *, since=1, scatter=0.02, seed=1):
    """A rise from 0.3 to 0.7, in which a run goes from step `since` on towards another end."""
    rise = 0.3 + 0.4 * -np.expm1(-(STEPS - 1) / 25)
    return outcome(
        noisy(
            np.where(since > STEPS, rise, rise[since - 1] + (ends - 0.3) * (rise - rise[since - 1]) / 0.4),
            scatter,
            seed,
        )
    )


@pytest.mark.parametrize(("ends", "is_flat"), [(0.3, True), (0.48, True), (0.53, False), (0.66, False)])
def test_a_run_is_flat_below_half_of_its_baseline_s_rise(ends, is_flat):
    found = find_flat(learning(ends), learning(0.7))
    assert (found is not None) == is_flat
    if is_flat:
        assert found.kind == "flat"
        assert found.before == pytest.approx(0.7, abs=0.02)
        assert found.after == pytest.approx(ends, abs=0.02)


@pytest.mark.parametrize("since", [1, 5, 20])
def test_a_flat_run_parts_from_its_baseline_where_it_stops_to_follow(since):
    run, baseline = learning(0.3, since=since), learning(0.7)
    found = find_flat(run, baseline)
    first, last = found.interval
    assert first <= since <= last <= since + 12
    assert first <= found.step <= last
    equal = np.flatnonzero(run.values != baseline.values)[0]
    assert first >= int(STEPS[max(equal - 1, 0)])


def test_healthy_runs_are_not_flat():
    slower = outcome(noisy(0.3 + 0.4 * -np.expm1(-(STEPS - 1) / 40), 0.02, 9))
    for seed in range(20):
        assert find_flat(learning(0.7, seed=seed), learning(0.7, seed=100 + seed)) is None
        assert find_flat(slower, learning(0.7, seed=seed)) is None
    level = outcome(noisy(np.full(100, 0.7), 0.02))
    assert find_flat(outcome(noisy(np.full(100, 0.5), 0.02)), level) is None  # nothing rises
    assert find_flat(learning(0.3), learning(0.3, seed=2)) is None


@pytest.mark.parametrize(("width", "kind"), [(13, "collapse"), (13.5, "slow_decline")])
def test_a_collapse_takes_a_tenth_of_the_run(width, kind):
    fall = find_fall(outcome(noisy(np.interp(STEPS, [45, 45 + width], [1.0, 0.2]), 1e-3)))
    assert fall.kind == kind
    # 0.35 of it is lost at the end of that share of the slope.
    assert fall.fallen == pytest.approx(45 + 0.35 * width, abs=1.01)


def test_a_reward_that_falls_beside_an_evaluation_that_holds_is_the_fall():
    of_reward = replace(FALL, onset_of="reward", low=59, high=60, interval=(58, 61))
    of_evaluation = replace(FALL, outcome="eval", onset_of="eval")
    assert refined(None, of_reward) == of_reward
    assert refined(of_evaluation, None) == of_evaluation
    both = refined(of_evaluation, of_reward)
    assert (both.outcome, both.onset_of, both.interval) == ("eval", "reward", (58, 61))
    assert refined(None, None) is None


@pytest.mark.parametrize(
    ("least", "is_evaluation", "floor"), [(-0.1, True, -1.0), (0.0, True, 0.0), (0.0, False, -1.0)]
)  # fmt: skip
def test_the_floor_of_an_outcome(least, is_evaluation, floor):
    values = np.array([least, 1.0, 2.0])
    assert timeline._outcome("eval", STEPS[:3], values, -1.0, is_evaluation=is_evaluation).floor == floor


def test_a_fall_and_its_change_have_one_onset():
    rise, descent, later = change(20, 0.2, 0.8), change(61, 0.8, 0.3), change(90, 0.5, 0.3)
    found = with_onset((rise, descent, later), FALL)
    assert [(one.step, one.low, one.high) for one in found] == [(20, 20, 20), (60, 57, 63), (90, 90, 90)]
    assert with_onset((rise, later), FALL) == (rise, later)
    assert with_onset((descent,), None) == (descent,)


# --- codes ------------------------------------------------------------------------------------------------------------


def test_every_code_in_the_rules_has_a_sentence():
    room = Path(text.__file__).parent
    source = "".join(file.read_text(encoding="utf-8") for file in room.rglob("*.py") if file.name != "text.py")
    known = {*EVIDENCE, *DIFFERENCES, *NOTES, *SUSPECTS}
    assert set(re.findall(r'(?:code=|fact\(\s*)"(\w+)"', source)) <= known
    unused = {code for code in (*EVIDENCE, *DIFFERENCES, *NOTES) if f'"{code}"' not in source}
    assert unused == set()


@pytest.mark.parametrize(("still", "said"), [(0.0, "for all 1,075"), (0.1, "for 90% of 1,075")])
def test_an_engine_that_moves_on_is_told_by_the_prefixes_that_changed(still, said):
    values = {"still_share": still, "num_openings": 1075, "trainer_share": 0.0}
    assert said in text.evidence_sentence(Evidence(points=0.0, code="engine_moves_on", values=values))


@pytest.mark.parametrize(("jumps_at", "size"), [(64, 2.0), (65, 2.0), (66, 0.003)])
def test_a_mismatch_that_jumps_where_a_good_part_is_lost_has_its_size_from_then_on(jumps_at, size):
    # A reward that is lost within one step: no later step is of the onset.
    values = np.where(jumps_at > STEPS, 0.003, 2.0)
    series = {"mean_abs_d": Series("mean_abs_d", STEPS, values, "log", "mismatch")}
    assert read_mismatch_size(series, FALL) == size


def test_one_step_of_mismatch_at_the_end_of_an_onset_is_an_outlier():
    values = np.where(STEPS == 65, 2.0, 0.003)
    assert read_mismatch_size({"mean_abs_d": Series("mean_abs_d", STEPS, values, "log", "mismatch")}, FALL) == 0.003


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("limit", "truncation"), ("gen.tokens_limit", "truncation"), ("max_gen_tokens", "truncation"), ("max_response_length", "truncation"),
        ("max_prompt_length", "data"), ("kl_limit", "reference"), ("clip_limit", "optimizer"), ("betas2", "optimizer"),
        ("optim/beta_1", "optimizer"), ("adam_beta2", "optimizer"), ("beta", "reference"), ("speed_limit", "unknown"),
        ("schedule", "optimizer"), ("optim/scheduler", "optimizer"), ("kl_schedule", "reference"),
    ],
)  # fmt: skip
def test_a_setting_belongs_to_a_suspect_by_its_name(name, owner):
    assert suspect_of(name) == owner
