"""Every verdict of objective and dynamics, just under and just over what decides it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tim_trace.analysis.dynamics.dynamics import onsets_of, summarise
from tim_trace.analysis.dynamics.text import summary_sentences
from tim_trace.analysis.facts.changes import ChangePoint
from tim_trace.analysis.facts.series import Fall
from tim_trace.analysis.objective.sentences import verdict_sentence
from tim_trace.analysis.objective.verdict import Estimate, direction, verdict
from tim_trace.analysis.rows import Rows
from tim_trace.schemas.loss import Loss

STEPS = Rows(("step", "bias"), [(1, 0.1), (2, -0.3), (3, None)])
PPO = Loss()


def estimate(value, low=None, high=None):
    return Estimate(name="x", value=value, low=low, high=high, no_interval="fewer than 8 groups", meaning="")


def sentence(part):
    return verdict_sentence(part, 0.95)


NOISE = [
    (0.00099, "negligible_noise", "and it adds negligible noise."), (0.00101, "moderate_noise", "but it adds noise."),
    (0.0499, "moderate_noise", "but it adds noise."), (0.0501, "large_noise", "but it adds a lot of noise."),
]  # fmt: skip


@pytest.mark.parametrize(("size", "code", "words"), NOISE)
def test_noise_is_named_by_its_size(size, code, words):
    part = direction(estimate(0.0, -0.1, 0.1), estimate(size))
    assert part.code == code
    assert words in sentence(part)


PUSHES = [
    (0.00099, "negligible_push_up", "upward by a negligible amount: the loss overstates it"),
    (0.00101, "small_push_up", "slightly upward: the loss overstates it"),
    (0.0499, "small_push_up", "slightly upward: the loss overstates it"),
    (0.0501, "large_push_up", "strongly upward: the loss overstates it"),
    (-0.00099, "negligible_push_down", "downward by a negligible amount: the loss understates it"),
    (-0.0499, "small_push_down", "slightly downward: the loss understates it"),
    (-0.0501, "large_push_down", "strongly downward: the loss understates it"),
]


@pytest.mark.parametrize(("bias", "code", "words"), PUSHES)
def test_a_push_is_named_by_size_and_sign(bias, code, words):
    part = direction(estimate(bias, min(bias * 0.5, bias * 1.5), max(bias * 0.5, bias * 1.5)), estimate(0.2))
    assert part.code == code
    assert f"The mismatch biases the objective {words}" in sentence(part)


@pytest.mark.parametrize(
    ("low", "high", "code"),
    [
        (0.0, 0.02, "large_noise"), (1e-9, 0.02, "small_push_up"), (-0.02, 0.0, "large_noise"), (-0.02, -1e-9, "small_push_down"),
        (None, None, "undecided"),
    ],
)  # fmt: skip
def test_a_push_is_one_whose_interval_leaves_out_0(low, high, code):
    part = direction(estimate(-0.01 if high is not None and high <= 0 else 0.01, low, high), estimate(0.2))
    assert part.code == code


@pytest.mark.parametrize(
    ("bias", "free", "code"),
    [
        (0.01, 0.0, "small_push_up"), (0.01, 1e-9, "small_push_up"), (0.01, -1e-9, "small_opposed"),
        (-0.01, 1e-9, "small_opposed"), (-0.01, -1e-9, "small_push_down"), (0.00099, -1.0, "negligible_opposed"),
        (0.0501, -1.0, "large_opposed"), (0.01, None, "small_push_up"),
    ],
)  # fmt: skip
def test_a_sign_that_the_clip_alone_gives_is_none(bias, free, code):
    sides = estimate(bias, min(bias * 0.5, bias * 1.5), max(bias * 0.5, bias * 1.5)), estimate(0.2), estimate(free)
    part = direction(*sides)
    assert part.code == code
    assert ("This comes from clipping" in sentence(part)) == code.endswith("opposed")
    assert direction(estimate(bias, -1.0, 1.0), *sides[1:]).code == "large_noise"


def test_the_size_of_a_bias_in_words():
    part = direction(estimate(-0.0123, -0.02, -0.01), estimate(0.2))
    assert sentence(part).endswith(
        "Relative to the sum of the terms' absolute values, the net bias is -1.23% (95% interval over groups -2% to -1%), and the absolute biases add up to 20%."
    )
    undecided = sentence(direction(estimate(-0.0123), estimate(0.2)))
    assert undecided.startswith(
        "Cannot tell whether the mismatch biases the objective: fewer than 8 groups. Relative to the sum"
    )
    assert "the net bias is -1.23%, and" in undecided


def figures(**given):
    values = {
        "relative_bias": 0.01, "relative_abs_bias": 0.2, "relative_positive": 0.0, "relative_negative": 0.0,
    } | given  # fmt: skip
    return {name: estimate(value) for name, value in values.items() if value != "absent"}


def codes(loss=PPO, *, steps=STEPS, num_tokens=10, **given):
    return [part.code for part in verdict(loss, figures(**given), steps, num_tokens)]


@pytest.mark.parametrize(
    ("loss", "given", "expected"),
    [
        (Loss(), {"num_tokens": 0}, ["no_tokens"]), (Loss(), {"relative_bias": None}, ["no_advantage"]),
        (Loss(), {"relative_abs_bias": None}, ["no_advantage"]), (Loss(), {"relative_abs_bias": 0.0}, ["no_effect"]),
        (Loss(denominator="rollout"), {"relative_abs_bias": 0.0}, ["in_ratio"]),
        (Loss(denominator="rollout", correction="token_truncate", correction_high=2.0), {"relative_abs_bias": 0.0}, ["no_effect"]),
        (Loss(), {"relative_bias": "absent"}, ["not_answerable"]),
        (Loss(), {"relative_bias": "absent", "mean_abs_d": 0.1, "mean_abs_sum_d": 1.0}, ["not_answerable", "ratios"]),
        (Loss(), {}, ["undecided", "worst_update"]), (Loss(), {"steps": Rows(("step", "bias"), [(1, 0.1)])}, ["undecided"]),
        (Loss(), {"relative_positive": 0.1}, ["undecided", "signs", "worst_update"]),
        (Loss(), {"flipped": 0.1, "clipped": 0.2}, ["undecided", "worst_update", "clip_decisions"]),
        (Loss(), {"uncorrected_relative_bias": 0.1, "uncorrected_relative_abs_bias": 0.3}, ["undecided", "worst_update", "correction"]),
    ],
)  # fmt: skip
def test_the_parts_of_a_verdict(loss, given, expected):
    assert codes(loss, **given) == expected


@pytest.mark.parametrize(
    ("positive", "negative", "words"),
    [
        (
            0.01,
            0.02,
            "tokens with A > 0 are credited too much by 1% and tokens with A < 0 are punished too little by 2%",
        ),
        (
            -0.01,
            -0.02,
            "tokens with A > 0 are credited too little by 1% and tokens with A < 0 are punished too much by 2%",
        ),
        (0.01, 0.0, "tokens with A > 0 are credited too much by 1%"),
    ],
)
def test_the_sides_of_a_bias(positive, negative, words):
    given = figures(relative_positive=positive, relative_negative=negative)
    signs = next(part for part in verdict(Loss(), given, STEPS, 9) if part.code == "signs")
    assert sentence(signs) == f"Overall, {words}."


def test_where_a_bias_lies():
    given = figures(flipped=0.1, clipped=0.2, uncorrected_relative_bias=-0.3, uncorrected_relative_abs_bias=0.4)
    for loss, terms in ((Loss(), "tokens"), (Loss(level="sequence_mean"), "sequences")):
        parts = {part.code: sentence(part) for part in verdict(loss, given, STEPS, 9)}
        assert (
            parts["clip_decisions"]
            == f"The mismatch flips the clip decision for 10% of the {terms}; 20% are clipped in total."
        )
    assert parts["worst_update"] == "The largest bias is at step 2 (-0.3, 75% of the total)."
    assert (
        "without the correction weights, the bias would be -30% instead of +1%, and absolute biases would add up to 40% "
        "instead of 20%" in parts["correction"]
    )


# --- dynamics ---------------------------------------------------------------------------------------------------------


def change(step, margin=0, size_in_sd=9.0, before=1.0, after=2.0):
    return ChangePoint(step, step - margin, step + margin, before, after, size_in_sd, 0.0)


@pytest.mark.parametrize(("size_in_sd", "num"), [(1.99, 0), (2.0, 1), (-1.99, 0), (-2.0, 1)])
def test_an_onset_is_a_change_of_two_deviations(size_in_sd, num):
    assert len(onsets_of({"reward": [change(9, size_in_sd=size_in_sd)]}, {"reward": "reward"})) == num


@pytest.mark.parametrize(("low", "undecided"), [(10, True), (11, False)])
def test_onsets_whose_intervals_touch_are_undecided(low, undecided):
    changes = {
        "reward": [ChangePoint(9, 8, 10, 1.0, 2.0, 9.0, 0.0)],
        "length": [ChangePoint(12, low, 13, 1.0, 2.0, 9.0, 0.0)],
    }
    first, second = onsets_of(changes, {"reward": "reward", "length": "length"})
    assert (first.may_be_first, second.may_be_first) == (True, undecided)
    assert (first.undecided, second.undecided) == ((("length",), ("reward",)) if undecided else ((), ()))


FALL = Fall(
    outcome="reward", onset_of="reward", kind="slow_decline", step=9, low=8, high=10, interval=(7, 11), fallen=12, before=0.8,
    after=0.3, size_in_sd=9.0,
)  # fmt: skip


def told(*, changes=None, fall=None, growth=(), num_steps=100):
    changes = changes or {}
    onsets = onsets_of(changes, dict.fromkeys(changes, "reward"))
    parts = tuple(summarise(changes, onsets, fall, growth, num_steps))
    return [part.code for part in parts], summary_sentences(
        SimpleNamespace(summary_codes=parts, onsets=onsets, fall=fall, trace="runs/run")
    )


@pytest.mark.parametrize(("num_steps", "code"), [(11, "too_short"), (12, "no_change")])
def test_changes_need_twelve_steps(num_steps, code):
    codes_, sentences = told(num_steps=num_steps)
    assert codes_ == [code]
    expected = (
        "The run is too short to find what changed first (steps recorded: 11, needed: 12)"
        if code == "too_short"
        else "No series changed by 2 or"
    )
    assert sentences[0].startswith(expected)


def test_what_moved_first():
    apart = {"reward": [change(9)], "length": [change(20, before=3.0)]}
    assert told(changes=apart) == (
        ["moved_first"], ("reward (rises at step 9; 1 to 2) changed first, before length.",)
    )  # fmt: skip
    together = {"reward": [change(9, margin=2)], "length": [change(10)]}
    codes_, (words,) = told(changes=together)
    assert codes_ == ["first_undecided"]
    assert words.startswith(
        "Could not determine which series changed first: reward (rises at step 9, 95% CI 7-11; 1 to 2); length"
    )


@pytest.mark.parametrize(("doubling", "expected"), [(5.0, ["k3_doubles"]), (-5.0, ["k3_halves"]), (None, [])])
def test_how_k3_compounds_at_the_end(doubling, expected):
    parts = (SimpleNamespace(part="run", doubling=3.0), SimpleNamespace(part="last third", doubling=doubling))
    codes_, sentences = told(growth=parts)
    assert codes_[1:] == expected
    assert all(words.endswith("every 5 steps.") for words in sentences[1:])


def test_what_else_is_told():
    codes_, sentences = told(changes={"learning_rate": [change(9)]}, fall=FALL)
    assert codes_ == ["no_change", "fall", "planned_change"]
    assert sentences[1].startswith("reward declines slowly from 0.8 to 0.3 after step 9 (95% CI 7-11)")
    assert sentences[2] == "The learning rate (a setting, not a measurement) changes at step 9."
