"""The cause of a fall, on runs that were made up to fall for one reason; benchmarks/collapse has runs that really do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shared import rest_slow
from tim_trace.analysis.attribution.attribute import attribute
from tim_trace.analysis.attribution.brief import attribution_brief
from tim_trace.analysis.attribution.fact import fact
from tim_trace.analysis.attribution.looks.losses import _policy_losses
from tim_trace.analysis.attribution.looks.samples import DATA_FAULTS
from tim_trace.analysis.attribution.model import unexplained
from tim_trace.analysis.attribution.settings import is_setting
from tim_trace.analysis.attribution.text import (
    attribution_text,
    difference_sentences,
    note_sentences,
    verdict_sentence,
)
from tim_trace.analysis.check.data_checks import FAULTS
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.diagnosis.text import story_of_run
from tim_trace.analysis.dynamics.dynamics import dynamics
from tim_trace.analysis.dynamics.text import summary_sentences
from tim_trace.analysis.facts.mismatch import read_earlier_weights
from tim_trace.analysis.facts.read_series import read_series
from tim_trace.analysis.facts.relations import changed_responses, relation
from tim_trace.analysis.facts.rollouts import Rollouts, repeated_responses
from tim_trace.analysis.facts.series import Outcome, find_fall, is_evaluation
from tim_trace.analysis.report.answers import OPEN, fall_answer
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.views import open_database
from tim_trace.schemas.steps import ALL_STEPS
from tim_trace.tracer.recorder import Recorder

STEPS, GROUPS, GROUP, TOKENS = 100, 4, 8, 6


def level(value: float) -> Callable[[int], float]:
    return lambda step: value


SEVEN_OF_TEN, ROUNDING, USUAL_RATE, ONE, SIX, NONE = (level(value) for value in (0.7, 1e-5, 1e-3, 1.0, TOKENS, 0.0))


def drops(at: int, before: float, after: float) -> Callable[[int], float]:
    return lambda step: before if step < at else after


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens in a run, by step."""

    reward: Callable[[int], float] = SEVEN_OF_TEN
    """Chance that a response is right."""
    pays: Callable[[int], float] = ONE
    """What a right one earns."""
    consoles: Callable[[int], float] = NONE
    """What a wrong one earns."""
    apart: Callable[[int], float] = NONE
    """Nats by which each token is less likely to the trainer than to the engine."""
    groups: bool = True
    """Whether responses carry the group that they belong to."""
    gap: Callable[[int], float] = ROUNDING
    """Standard deviation of train - rollout, nats."""
    lag: int = 0
    says_version: bool = True
    """Whether the trainer's pass says which weights scored."""
    rate: Callable[[int], float] = USUAL_RATE
    evaluation: Callable[[int], float] | None = None
    evaluated_as: str = "eval/accuracy"
    logs_every: int = 1
    """Steps between logged metrics."""
    entropy: Callable[[int], float] = ONE
    length: Callable[[int], int] = SIX
    pays_length: bool = False
    noise: Callable[[int], float] = NONE
    """Share of the rewards that are drawn anew."""
    shift: int = 0
    """Rows by which rewards lie in the wrong place."""
    by_prompt: bool = False
    """Whether right responses to every other prompt are rare."""
    mixes: Callable[[int], float] = NONE
    """Whether the rewards of a step are in random rows."""
    advantages_of: int = 0
    """Rows by which advantages lie in the wrong place."""
    limit: Callable[[int], int] | None = None
    """Longest response, in tokens."""
    says_limit: bool = False
    ends: bool = False
    """Whether an end token follows each response, even one at the limit."""
    runs_on: Callable[[int], int] | None = None
    """Tokens after the end token, which ends responses of this story only."""
    masks_right: Callable[[int], float] = NONE
    """Whether the loss mask leaves out right responses."""
    one_prompt: bool = False
    """Whether all prompts have the same tokens, and every other group rewards the responses that the others do not."""
    swaps: bool = False
    """Whether the rewards of each two neighbouring rows are exchanged."""
    sign: float = 1.0
    """Factor of the advantages."""
    """Added to the logged loss."""
    controller: Callable[[int], float] | None = None
    """KL coefficient, logged at each step."""
    coefficient: Callable[[int], float] | None = None
    """Coefficient of the entropy in the logged loss."""
    reinforces: bool = False
    """Whether the policy's term of the logged loss is advantage times logprob."""
    loss_name: str = "loss"
    settings: dict[str, Any] = field(default_factory=lambda: {"adam_beta2": 0.999})
    has_rollout: bool = True
    seed: int = 0


def record(path, story: Story = Story(), steps: int = STEPS):
    """A trace in which a story happens. Whether a response is right is a matter of its ids alone."""
    chance = np.random.default_rng(story.seed)
    with Recorder(path, force=True) as recorder:
        recorder.add_hyperparameters(story.settings)
        for step in range(1, steps + 1):
            record_step(recorder, story, step, chance)
    return path


def record_step(recorder, story, step, chance):
    rows = GROUPS * GROUP
    prompts = [[100 + (0 if story.one_prompt else (step * GROUPS + row // GROUP) % 16)] for row in range(rows)]
    rare = np.array([prompt[0] % 2 for prompt in prompts]) * story.by_prompt
    right = chance.random(rows) < story.reward(step) * (1 - 0.8 * rare)
    kind = chance.integers(0, 6, rows)
    lengths = [max(1, int(story.length(step)) + int(extra)) for extra in chance.integers(-1, 2, rows)]
    ids = [[int(right[r]) + 1, int(kind[r]) + 10, *range(20, 18 + max(lengths[r], 2))] for r in range(rows)]
    if story.limit is not None:
        ids = [row[: story.limit(step)] for row in ids]
    if story.ends:
        ids = [[*row, 99] for row in ids]
    if story.runs_on is not None:
        ids = [[*row, 99, *range(20, 20 + story.runs_on(step))] for row in ids]
    reward = np.where(
        chance.random(rows) < story.noise(step),
        chance.random(rows),
        np.where(right, story.pays(step), story.consoles(step)),
    )
    if story.one_prompt:
        reward = np.where(np.arange(rows) // GROUP % 2, 1.0 - right, right)
    if story.pays_length:
        reward = reward * 0.1 + np.array([len(row) for row in ids])
    reward = np.roll(reward, story.shift)
    if story.swaps:
        reward = reward.reshape(-1, 2)[:, ::-1].ravel()
    if story.mixes(step):
        reward = chance.permutation(reward)
    centred = reward.reshape(GROUPS, GROUP)
    advantage = story.sign * np.roll((centred - centred.mean(1, keepdims=True)).ravel(), story.advantages_of)
    batch = recorder.add_sequences(
        step=step,
        prompt_ids=prompts,
        response_ids=ids,
        group_ids=[f"{row // GROUP if story.groups else row}" for row in range(rows)],
        policy_version=max(step - 1 - story.lag, 0),
        reward=reward,
        advantage=advantage,
        response_mask=[[not (right[r] and story.masks_right(step))] * len(ids[r]) for r in range(rows)],
        max_tokens=[story.limit(step)] * rows if story.limit is not None and story.says_limit else None,
    )
    # Likelier responses are right ones more often, as those of a policy that knows something.
    scale = story.entropy(step)
    train = [-scale * chance.gamma(2.0, 0.3 if good else 0.6, len(row)) for row, good in zip(ids, right, strict=True)]
    if story.has_rollout:
        rollout = [np.minimum(one + chance.normal(0, story.gap(step), len(one)), 0.0) for one in train]
        recorder.add_scores("rollout", batch, logprobs=[one.tolist() for one in rollout])
    train = [one - story.apart(step) for one in train]
    recorder.add_scores(
        "train",
        batch,
        logprobs=[one.tolist() for one in train],
        policy_version=step - 1 if story.says_version else None,
    )
    metrics = {
        "learning_rate": story.rate(step),
        "grad_norm": 1.0 + 0.2 * chance.random(),
        "entropy": story.entropy(step) * (1 + 0.05 * chance.normal()),
    }
    if story.coefficient is not None:
        weights = [one.mean() if story.reinforces else 1.0 for one in train]
        policy = -float(np.mean(advantage * weights))
        metrics[story.loss_name] = policy - story.coefficient(step) * metrics["entropy"]
    if story.controller is not None:
        metrics["actor/kl_coef"] = story.controller(step)
    if story.evaluation is not None and step % 5 == 0:
        metrics[story.evaluated_as] = story.evaluation(step) + 0.01 * chance.normal()
    if step % story.logs_every == 0:
        recorder.add_metrics(step, metrics)
    recorder.add_metrics(step, {"queue/size": 1.0})


FALLING = drops(60, 0.8, 0.2)


def sliding(step: int) -> float:
    """No policy that is trained in small steps falls within one."""
    return float(np.interp(step, [50, 75], [0.8, 0.2]))


CAUSES = {
    "mismatch": Story(reward=FALLING, gap=drops(50, 1e-5, 0.4)),
    "staleness": Story(reward=FALLING, gap=lambda step: 1e-5 if step < 5 else 0.3, lag=16),
    "optimizer": Story(reward=FALLING, rate=lambda step: 2e-2 if 58 <= step < 68 else 1e-3),
    "reward": Story(reward=FALLING, noise=drops(60, 0.0, 0.6)),
    "pairing": Story(reward=FALLING, shift=3),
    "entropy": Story(reward=sliding, entropy=lambda step: float(np.interp(step, [50, 75], [1.0, 0.1]))),
    "length": Story(
        evaluation=drops(60, 0.8, 0.3), length=lambda step: 6 if step < 58 else 14, pays_length=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", rest_slow([cause for cause in CAUSES if cause != "entropy"], 3))
def test_a_run_that_falls_for_one_reason_is_seen_and_the_reason_named(tmp_path, cause):
    found = attribute(record(tmp_path / "run", CAUSES[cause]))
    assert found.fall is not None
    assert (found.suspects[0].code, found.kind) == (cause, "observation")
    if cause != "staleness":  # its lag is declared, and the mismatch alone does not make it sure
        assert found.cause == cause
    assert found.fall.low - 12 <= 59 <= found.fall.high + 12
    assert sum(suspect.probability for suspect in found.suspects) == pytest.approx(1.0)
    assert all(suspect.evidence for suspect in found.suspects)
    assert all(suspect.next for suspect in found.suspects if suspect.code != "unknown")
    assert found.suspects[0].titled() in attribution_text(found)


def test_an_entropy_that_falls_with_the_reward_is_no_cause(tmp_path):
    found = attribute(record(tmp_path / "run", CAUSES["entropy"]))
    assert found.fall is not None
    assert found.cause is None
    assert found.suspects[0].code != "entropy"


@pytest.mark.parametrize("seed", rest_slow(range(4)))
@pytest.mark.parametrize("gap", [0.0, 1e-3, 0.3])
def test_a_run_that_does_not_fall_has_no_cause(tmp_path, gap, seed):
    found = attribute(record(tmp_path / "run", Story(gap=level(gap), seed=seed)))
    assert (found.fall, found.suspects, found.cause) == (None, (), None)
    assert verdict_sentence(found).startswith("No collapse detected")


def test_a_mismatch_that_follows_a_fall_is_not_its_cause(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=drops(40, 0.8, 0.2), gap=drops(70, 1e-5, 0.5))))
    mismatch = next(suspect for suspect in found.suspects if suspect.code == "mismatch")
    assert mismatch.probability < 0.05


@pytest.mark.parametrize("says_limit", [False, True])
def test_a_limit_that_falls_before_the_drop_is_seen_in_lengths_and_in_the_recorded_setting(tmp_path, says_limit):
    story = Story(reward=FALLING, length=level(9), limit=drops(58, 20, 5), says_limit=says_limit)
    found = attribute(record(tmp_path / "run", story))
    assert found.cause == "truncation"
    evidence = evidence_of(found, "truncation")
    assert evidence["responses_capped"] > 1
    assert ("setting_changed" in evidence) == says_limit


def test_responses_that_the_policy_ends_at_one_length_are_not_cut_off(tmp_path):
    story = Story(reward=FALLING, length=level(9), limit=drops(58, 20, 5), ends=True)
    assert "responses_capped" not in {
        one.code for one in attribute(record(tmp_path / "run", story)).facts if one.level > 0.1
    }


def test_responses_that_go_on_after_the_end_token_are_truncated(tmp_path):
    story = Story(reward=drops(62, 0.8, 0.2), runs_on=lambda step: 0 if step < 60 else 4)
    found = attribute(record(tmp_path / "run", story))
    assert found.cause == "truncation"
    assert evidence_of(found, "truncation")["stop_ignored"] > 1


def test_responses_that_the_loss_mask_leaves_out_before_the_drop_are_truncated(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=drops(63, 0.8, 0.2), masks_right=drops(60, 0.0, 1.0))))
    assert found.cause == "truncation"
    assert evidence_of(found, "truncation")["rows_left_out"] > 1


def test_rewards_of_neighbouring_rows_that_are_exchanged_are_misaligned(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=FALLING, swaps=True)))
    assert found.cause == "pairing"
    assert "neighbouring rows swapped" in attribution_text(found)


def test_advantages_with_the_wrong_sign_from_the_first_step_are_told(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=lambda step: max(0.8 - step / 8, 0.1), sign=-1.0)))
    assert found.cause == "advantages"
    assert evidence_of(found, "advantages")["advantages_inverted"] > 3


def wave(step: int) -> float:
    return 1.0 + step % 7 / 10


@pytest.mark.parametrize(("declared", "actual", "code"), [
    (0.01, 0.01, None), (0.01, -0.02, "loss_term_inverted"), (0.01, 0.4, "loss_term_oversized"), (0.0, 0.4, "loss_term_oversized"),
])  # fmt: skip
def test_a_loss_that_contradicts_the_declared_coefficient_from_the_first_step_is_told(tmp_path, declared, actual, code):
    story = Story(reward=FALLING, entropy=wave, coefficient=level(actual), settings={"entropy_coef": declared})
    found = attribute(record(tmp_path / "run", story))
    told = [one for one in found.facts if one.code.startswith("loss_term_") and one.level > 0.5]
    assert [(one.code, one.group) for one in told] == [(code, "entropy")] * (code is not None)
    if code:
        assert told[0].values["coefficient"] == pytest.approx(-actual, rel=0.02)
        assert evidence_of(found, "entropy")[code] > 1


@pytest.mark.parametrize(("actual", "code"), [(0.01, None), (-0.3, "loss_term_inverted"), (0.5, "loss_term_unusual")])
def test_a_loss_of_logprobs_times_advantages_tells_an_undeclared_coefficient(tmp_path, actual, code):
    story = Story(reward=FALLING, entropy=wave, coefficient=level(actual), reinforces=True, loss_name="objective/loss")
    found = attribute(record(tmp_path / "run", story))
    told = [one for one in found.facts if one.code.startswith("loss_term_") and one.level > 0.3]
    assert [(one.code, one.group) for one in told] == [(code, "entropy")] * (code is not None)
    assert all(one.values["coefficient"] == pytest.approx(-actual, rel=0.05) for one in told)


@pytest.mark.parametrize("has_advantage", [lambda step: True, lambda step: step % 2, lambda step: False])
def test_the_policy_loss_is_that_of_the_ratios_inside_the_loss(tmp_path, has_advantage):
    """A step without advantages has no policy loss."""
    chance, expected = np.random.default_rng(0), []
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 41):
            train, now = (-chance.random((4, 3)) for _ in range(2))
            advantage, ratio = chance.normal(size=(4, 1)), np.exp(now - train)
            expected.append(-np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage).mean())
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * 4, response_ids=[[2, 3, 4]] * 4, policy_version=step - 1,
                advantage=advantage.ravel() if has_advantage(step) else None,
            )  # fmt: skip
            recorder.add_scores("train", batch, logprobs=train.tolist())
            recorder.add_scores("current", batch, logprobs=now.tolist())
            recorder.add_metrics(step, {"loss": expected[-1]})
    losses = [(steps, np.asarray(values)) for steps, values in _policy_losses(open_database(tmp_path / "run"))]
    if any(map(has_advantage, range(1, 41))):
        assert [len(steps) for steps, _ in losses] == [40] * 3
        for (_, values), tokens in zip(losses, (1, 1, 3), strict=True):
            want = [one * tokens if has_advantage(step + 1) else np.nan for step, one in enumerate(expected)]
            np.testing.assert_allclose(values, want, rtol=1e-5)
    else:
        assert not any(np.isfinite(values).any() for _, values in losses)


def test_the_value_loss_is_not_the_policy_s(tmp_path):
    story = Story(reward=FALLING, coefficient=level(0.5), entropy=wave, loss_name="value/loss")
    assert not [one for one in attribute(record(tmp_path / "run", story)).facts if one.code.startswith("loss_")]


@pytest.mark.parametrize("name", ["critic/reward", "reward_model/reward"])
def test_a_reward_under_another_model_s_prefix_is_the_reward(tmp_path, name):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 5):
            recorder.add_metrics(step, {name: step / 4})
    series = read_series(open_database(tmp_path / "run"), pair=("train", "rollout"))
    assert series["reward"].values.tolist() == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("declared", "is_told"), [(1e-3, True), (0.1, False)])
def test_a_learning_rate_above_the_declared_one_is_told(tmp_path, declared, is_told):
    story = Story(reward=FALLING, rate=lambda step: 1e-3 * (1 + step), settings={"learning_rate": declared})
    told = [one for one in attribute(record(tmp_path / "run", story)).facts if one.code == "learning_rate_beyond"]
    assert [one.values["step"] for one in told] == [1] * is_told


@pytest.mark.parametrize(("pays", "is_told"), [(1.0, False), (0.1, True)])
def test_rewards_that_start_below_the_evaluation_are_told(tmp_path, pays, is_told):
    story = Story(reward=level(0.8), pays=level(pays), evaluation=drops(60, 0.8, 0.3))
    told = [one for one in attribute(record(tmp_path / "run", story)).facts if one.code == "reward_starts_below"]
    assert [one.level > 0.5 for one in told if one.level > 0.2] == [True] * is_told


def test_equal_prompts_with_unequal_right_responses_point_to_the_prompts(tmp_path):
    found = attribute(record(tmp_path / "run", Story(evaluation=drops(60, 0.8, 0.2), one_prompt=True)))
    assert evidence_of(found, "data")["rewards_differ_by_group"] > 1
    sound = attribute(record(tmp_path / "sound", Story(evaluation=drops(60, 0.8, 0.2))))
    assert "rewards_differ_by_group" not in {one.code for one in sound.facts}


def test_logprobs_in_other_rows_explain_the_mismatch():
    facts = [fact("logprobs_in_other_rows", 1.0), fact("mismatch_size", 1.0), fact("mismatch_grows_with_fall", 0.9)]
    assert {one.level for name, one in unexplained(facts).items() if name != "logprobs_in_other_rows"} == {0.0}


def test_rewards_that_check_finds_in_other_rows_count_for_misaligned_rows(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=FALLING, advantages_of=1)))
    assert evidence_of(found, "pairing")["data_fault"] > 1
    assert "check finds a fault from step 1 on: rewards belong to other rows" in attribution_text(found)


def test_rewards_that_check_finds_in_other_rows_are_told_without_a_drop(tmp_path):
    found = attribute(record(tmp_path / "run", Story(advantages_of=1)))
    assert found.fall is None
    assert found.supposed is not None
    assert (found.supposed.suspects[0].code, found.supposed.step) == ("pairing", 1)


def test_a_coefficient_that_a_controller_raises_is_a_setting_that_changes(tmp_path):
    found = attribute(
        record(tmp_path / "run", Story(reward=FALLING, controller=lambda step: 0.02 * 1.2 ** max(step - 45, 0)))
    )
    assert found.cause == "reference"
    assert "actor/kl_coef changes from 0.02" in attribution_text(found)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("actor/kl_coef", True), ("kl_coef/mean", True), ("policy/kl_weight", True), ("optimizer/weight_norm", False)],
)
def test_a_metric_with_the_name_of_a_coefficient_is_a_setting(name, is_one):
    assert is_setting(name) == is_one


@pytest.mark.parametrize("name", ["pg_loss", "policy/loss", "loss/policy"])
def test_the_loss_is_read_under_the_names_that_trainers_log_it_by(tmp_path, name):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 4):
            recorder.add_metrics(step, {name: step / 4})
    assert read_series(open_database(tmp_path / "run"))["loss"].values.tolist() == [0.25, 0.5, 0.75]


def test_every_data_fault_that_counts_for_a_suspect_exists_in_check():
    assert {code for codes in DATA_FAULTS.values() for code in codes.split()} <= {code for code, _ in FAULTS}


def evidence_of(found, code):
    """Code -> points of the evidence of one suspect."""
    (suspect,) = (each for each in found.suspects if each.code == code)
    return {each.code: each.points for each in suspect.evidence}


@pytest.mark.slow
def test_what_was_there_before_a_fall_is_not_its_cause(tmp_path):
    noisy = attribute(record(tmp_path / "noise", Story(reward=FALLING, noise=level(0.6))))
    certain = attribute(record(tmp_path / "entropy", Story(reward=sliding, entropy=lambda step: max(0.9**step, 0.2))))
    assert (noisy.cause, certain.cause) == (None, None)


@pytest.mark.slow
def test_a_fall_that_nothing_explains_cannot_be_told(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=sliding)))
    assert found.cause is None
    assert "Cause unknown." in verdict_sentence(found)
    assert "The mismatch is not the cause" in verdict_sentence(found)


@pytest.mark.slow
def test_a_control_that_did_not_fall_makes_the_difference_the_cause(tmp_path):
    run = record(tmp_path / "run", Story(reward=sliding, gap=level(0.03)))
    control = record(tmp_path / "control", Story(gap=level(0.0)))
    beside = attribute(run, control=control)
    assert (beside.cause, beside.kind) == ("mismatch", "intervention")
    assert any("mean |d|" in each for each in difference_sentences(beside))


@pytest.mark.slow
def test_a_control_that_fell_too_clears_what_they_differ_in(tmp_path):
    run = record(tmp_path / "run", Story(reward=FALLING, gap=level(0.3)))
    control = record(tmp_path / "control", Story(reward=FALLING, gap=level(0.0)))
    found = attribute(run, control=control)
    assert found.cause != "mismatch"
    assert "The mismatch is not the cause" in verdict_sentence(found) or found.suspects[0].code == "unknown"


def test_a_run_that_does_not_learn_beside_its_baseline_is_an_event_with_an_onset_and_a_cause(tmp_path):
    def rising(step):
        return float(np.interp(step, [12, 50], [0.3, 0.8]))

    baseline = record(tmp_path / "baseline", Story(reward=rising))
    run = record(
        tmp_path / "run", Story(reward=level(0.3), settings={"adam_beta2": 0.999, "learning_rate": 0.0}, rate=NONE)
    )
    assert attribute(run).fall is None
    found = attribute(run, control=baseline)
    assert found.fall.kind == "flat"
    assert found.fall.interval[0] <= 14
    assert 12 <= found.fall.interval[1] <= 24
    assert found.cause == "optimizer"
    first, last = found.fall.interval
    stays = f"reward stays at {found.fall.after:.3g} while the baseline's rises to {found.fall.before:.3g}, diverging after step"
    assert verdict_sentence(found).startswith(f"Learning stalled: {stays} {found.fall.step} (95% CI {first}-{last}).")
    assert stays in story_of_run(found, None)
    assert result_json(found)["fall"]["kind"] == "flat"
    assert "Learning stalled" in attribution_brief(found)
    short = fall_answer(SimpleNamespace(attribution=found, diagnosis=None)).short
    assert short.startswith("learning stalled: the optimizer")
    assert attribute(baseline, control=run).fall is None


def test_a_control_with_other_prompts_is_an_observation(tmp_path):
    run = record(tmp_path / "run", Story(reward=FALLING, gap=level(0.3)))
    other = tmp_path / "control"
    with Recorder(other) as recorder:
        for step in range(2, 40):
            record_step(recorder, Story(), step, np.random.default_rng(step))
    found = attribute(run, control=other)
    assert found.kind == "observation"
    assert any("with different prompts" in note for note in note_sentences(found))


@pytest.mark.parametrize(("prompts", "is_warned"), [([[8], [9]], True), ([[8], [2]], False), (None, False)])
def test_a_control_that_recorded_only_other_prompts_is_warned_of(tmp_path, prompts, is_warned):
    for name, prompt_ids in (("run", [[1], [2]]), ("control", prompts)):
        with Recorder(tmp_path / name) as recorder:
            for step in range(1, 5):
                recorder.add_sequences(step=step, prompt_ids=prompt_ids, response_ids=[[2], [3]], reward=[0.0, 1.0])
    with pytest.warns(UserWarning, match="shares no prompts with") if is_warned else nullcontext():
        attribute(tmp_path / "run", control=tmp_path / "control")


def test_curves_alone_do_not_show_that_the_policy_stays_nor_have_responses(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 61):
            recorder.add_metrics(step, {"reward": (0.5 if step < 40 else 0.1) + 0.01 * (step % 3)})
    found = attribute(tmp_path / "run")
    assert found.fall is not None
    assert [one.code for one in found.facts] == []
    assert not any("sequences." in str(suspect.next) for suspect in found.suspects)
    (command,) = diagnose(tmp_path / "run").next
    assert command.command.startswith("tim-trace record")


def test_without_an_outcome_nothing_is_judged(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 30):
            batch = recorder.add_sequences(step=step, prompt_ids=[[1]], response_ids=[[2, 3]])
            recorder.add_scores("train", batch, logprobs=[[-1.0, -0.5]])
    found = attribute(tmp_path / "run")
    assert (found.outcome, found.fall) == ("", None)
    assert "neither rewards nor evaluations were recorded at three steps or more" in verdict_sentence(found)


def test_a_run_without_a_rollout_pass_says_that_no_mismatch_can_be_seen(tmp_path):
    story = dataclasses.replace(CAUSES["optimizer"], has_rollout=False)
    found = attribute(record(tmp_path / "run", story))
    assert found.cause == "optimizer"
    assert any("share no token" in note for note in note_sentences(found))


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_a_short_run_has_no_fall(tmp_path, steps):
    assert attribute(record(tmp_path / "run", Story(), steps)).fall is None


def test_an_evaluation_is_known_by_its_name():
    assert all(
        is_evaluation(name)
        for name in (
            "eval/reward",
            "val-core/acc/mean@4",
            "test_score",
            "eval_accuracy",
            "eval/held_out",
            "eval/gsm8k",
            "heldout/coins",
            "holdout/score",
            "dev/exact_match",
        )
    )
    assert not any(
        is_evaluation(name)
        for name in (
            "reward",
            "eval/runtime",
            "evaluations",
            "train/reward",
            "eval_loss",
            "evaluation_time",
            "eval/tokens_per_second",
            "val/ppl",
        )
    )


@pytest.mark.parametrize("name", ["holdout/score", "greedy/success"])
def test_a_score_that_is_logged_at_few_steps_is_an_evaluation(tmp_path, name):
    found = attribute(record(tmp_path / "run", Story(evaluation=drops(60, 0.8, 0.3), evaluated_as=name)))
    assert (found.outcome, found.fall is not None) == (name, True)


def test_a_reward_that_is_logged_as_rarely_as_the_gradient_norm_is_no_evaluation(tmp_path):
    story = Story(reward=FALLING, evaluation=drops(60, 0.8, 0.3), evaluated_as="rewards/mean", logs_every=5)
    assert attribute(record(tmp_path / "run", story)).outcome == "reward"


def outcome(values):
    return Outcome(name="reward", steps=np.arange(1, len(values) + 1), values=np.asarray(values), is_evaluation=False)


def test_noise_alone_falls_in_fewer_than_one_of_a_hundred_runs():
    chance = np.random.default_rng(1)
    falls = 0
    for _ in range(400):
        values = np.zeros(150)
        for i in range(1, 150):
            values[i] = 0.5 * values[i - 1] + chance.normal()
        falls += find_fall(outcome(0.6 + 0.05 * values)) is not None
    assert falls <= 4


@pytest.mark.slow
def test_the_onset_lies_within_its_interval():
    # From the level of the best window, which is too high, breaks come too early: they held 8 of 10 and 1 of 4.
    for phi, slope in ((0.0, 0.02), (0.5, 0.005)):
        chance = np.random.default_rng(2)
        held = 0
        for _ in range(60):
            at = int(chance.integers(30, 110))
            truth = np.where(np.arange(150) < at, 0.7, np.maximum(0.7 - slope * (np.arange(150) - at + 1), 0.2))
            noise = chance.normal(size=200)
            for i in range(1, 200):
                noise[i] += phi * noise[i - 1]
            fall = find_fall(outcome(truth + 0.04 * math.sqrt(1 - phi * phi) * noise[50:]))
            if fall is not None:
                # The last step that the fall leaves alone is `at`, and the first that it moves the next one.
                held += fall.interval[0] <= at + 1 and at <= fall.interval[1]
                assert fall.interval[0] <= fall.low <= fall.step <= fall.high <= fall.interval[1]
            else:
                held += 1
        assert held >= 0.93 * 60, phi


def test_a_fall_is_told_with_its_interval(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=drops(60, 0.7, 0.1))))
    first, last = found.fall.interval
    assert first <= 60 <= last + 1
    assert f"after step {found.fall.step} (95% CI {first}-{last})" in verdict_sentence(found)


@pytest.mark.slow
def test_dynamics_and_attribute_report_one_onset_of_a_fall(tmp_path):
    run = record(tmp_path / "run", Story(reward=drops(60, 0.7, 0.1)))
    fall, moved = attribute(run).fall, dynamics(run)
    assert moved.fall == fall
    onset = next(onset.change for onset in moved.onsets if onset.name == "reward")
    assert (onset.step, onset.low, onset.high) == (fall.step, *fall.interval)
    assert any(
        f" after step {fall.step}" in sentence and f"tim-trace attribute {moved.trace}." in sentence
        for sentence in summary_sentences(moved)
    )
    assert dynamics(run, steps="1:90").fall == attribute(run, steps="1:90").fall is not None
    assert dynamics(run, steps="1:50").fall is attribute(run, steps="1:50").fall is None


def rollouts(**columns):
    n = len(columns["reward"])
    empty = {name: np.zeros(n) for name in Rollouts.__dataclass_fields__}
    return Rollouts(**empty | {name: np.asarray(values) for name, values in columns.items()})


def test_repeats_find_rewards_that_lie_some_rows_off():
    chance = np.random.default_rng(3)
    whole, step = chance.integers(0, 20, 800), np.repeat(np.arange(25), 32)
    reward = (whole % 7).astype(float)
    sound = repeated_responses(rollouts(whole=whole, step=step, reward=reward))
    moved = np.concatenate([np.roll(part, 5) for part in reward.reshape(25, 32)])
    found = repeated_responses(rollouts(whole=whole, step=step, reward=moved))
    assert (sound.unequal, sound.order) == (0.0, "")
    assert found.unequal > 0.5
    assert (found.order, found.unequal_ordered) == ("rewards shifted by 5 rows within the step", 0.0)


def test_a_reference_that_is_swapped_is_seen_row_by_row():
    chance = np.random.default_rng(6)
    whole, step = chance.integers(0, 40, 1600), np.repeat(np.arange(50), 32)
    likely = -1.0 - whole / 40 + 0.01 * chance.normal(size=1600)
    swapped = rollouts(whole=whole, step=step, reward=np.zeros(1600), reference=likely - (step >= 30) * (whole % 5) / 4)
    found = changed_responses(swapped, "reference", first=20, last=40, least=0.05)
    assert found.step == 30
    assert found.share_before < 0.01
    assert found.share == pytest.approx(0.8, abs=0.1)


@pytest.mark.slow
def test_a_reward_that_becomes_another_one_without_a_fall_is_told(tmp_path):
    run = record(tmp_path / "run", Story(pays=lambda step: 1.0 if step < 60 else 2.0))
    found = attribute(run)
    assert found.fall is None
    (note,) = [each for each in found.note_codes if each.code == "reward_changed"]
    assert note.values["step"] == 60
    assert "but the reward itself changed" in verdict_sentence(found)
    assert not [each for each in attribute(record(tmp_path / "b")).note_codes if each.code == "reward_changed"]


INVERTED = Story(reward=drops(60, 0.7, 0.3), pays=drops(60, 1.0, 0.0), consoles=drops(60, 0.0, 1.0))


@pytest.mark.parametrize(
    ("story", "cause", "step"),
    rest_slow([(INVERTED, "reward", 60), (Story(apart=drops(40, 0.0, 2.0)), "mismatch staleness", 40)], 1),
)
def test_a_change_that_hides_a_fall_is_told_with_its_step_and_is_no_fall(tmp_path, story, cause, step):
    found = attribute(record(tmp_path / "run", story))
    assert (found.fall, found.suspects, found.cause) == (None, (), None)
    supposed = found.supposed_cause
    assert (supposed.suspects[0].code in cause.split(), supposed.step) == (True, step)
    assert f"{supposed.suspects[0].titled()}, starting at step {step}" in verdict_sentence(found)
    assert "No collapse detected" in verdict_sentence(found)
    assert {fact.order(found.fall) for fact in found.facts} == {None}
    assert f"rated as for a drop at step {step}, although none was found)" in attribution_brief(found)
    for render in (attribution_text, attribution_brief):
        whole, lines = render(found), render(found, 80).splitlines()
        copied = [line for line in lines if line.lstrip().startswith(("next: tim-trace", "tim-trace ", "SELECT "))]
        assert copied
        assert max(len(line) for line in lines if line not in copied) <= 80 < max(map(len, whole.splitlines()))
        assert " ".join(" ".join(lines).split()) == " ".join(whole.split())
    assert result_json(found)["supposed"]["suspects"][0]["evidence"][0]["sentence"] in attribution_text(found)
    subject = SimpleNamespace(attribution=found, trace="run", asked_steps=ALL_STEPS, pair=("train", "rollout"))
    answer = fall_answer(subject)
    assert (answer.code, answer.severity) == ("unseen", OPEN)
    assert supposed.suspects[0].title in answer.short


def test_where_nothing_fell_no_evidence_states_a_drop(tmp_path):
    rises = Story(
        apart=drops(40, 0.0, 2.0), reward=lambda step: 0.4 + step / 300, evaluation=lambda step: 0.3 + step / 400
    )
    supposed = attribute(record(tmp_path / "run", rises)).supposed
    assert supposed.step == 40
    assert "reward_hides_fall" not in {each.code for suspect in supposed.suspects for each in suspect.evidence}


@pytest.mark.slow
def test_rewards_that_are_not_the_control_s_are_told_where_nothing_fell(tmp_path):
    run, control = record(tmp_path / "run", INVERTED), record(tmp_path / "control")
    found = attribute(run, control=control).supposed_cause
    assert (found.suspects[0].code, found.step) == ("reward", 60)
    assert attribute(control, control=record(tmp_path / "other", Story(seed=1))).supposed_cause is None


def test_an_advantage_agrees_with_its_reward_whatever_it_is_divided_by():
    chance = np.random.default_rng(4)
    reward, group = chance.random(320), np.repeat(np.arange(40), 8)
    centred = reward - np.repeat(reward.reshape(40, 8).mean(1), 8)
    scaled = centred * np.repeat(chance.uniform(0.01, 100, 40), 8)
    assert relation(
        rollouts(reward=reward, advantage=scaled, group=group), "reward", "advantage"
    ).by_group == pytest.approx(1)
    rolled = rollouts(reward=reward, advantage=np.roll(scaled, 1), group=group)
    assert relation(rolled, "reward", "advantage").by_group < 0.5


def test_a_relation_is_that_within_groups():
    group = np.repeat(np.arange(40), 4)
    x = np.tile([0.0, 1.0, 2.0, 3.0], 40)
    found = relation(rollouts(reward=x + 10 * group, length=-x - 7.0 * group, group=group), "reward", "length")
    assert found.correlation == pytest.approx(-1.0)


def openings(sampled_at):
    """Sixteen prompts that come again, under weights that move in a straight line and back."""
    step, prompt = (grid.ravel() for grid in np.meshgrid(np.arange(1, 101), np.arange(16), indexing="ij"))
    pull = np.random.default_rng(5).normal(size=16)[prompt]
    trained = -2 + pull * np.sin(step / 20)
    return rollouts(
        reward=np.zeros(len(step)), step=step, opening=prompt, opening_trained=trained,
        opening_sampled=-2 + pull * sampled_at(step),
    )  # fmt: skip


def test_weights_that_are_behind_say_what_the_trainer_said_before():
    found = read_earlier_weights(openings(lambda step: np.sin((step - 9) / 20)), 1)
    assert (found.version, found.is_distance, found.explains) == (9, True, True)


@pytest.mark.parametrize(("noise", "explains"), [(0.005, True), (0.2, False)])
def test_an_engine_that_is_behind_is_told_although_it_rounds(noise, explains):
    run = openings(lambda step: np.sin((step - 9) / 20))
    rounded = run.opening_sampled + np.random.default_rng(6).normal(0, noise, len(run.step))
    found = read_earlier_weights(dataclasses.replace(run, opening_sampled=rounded), 1)
    assert (found.version == 9 and found.is_distance, found.explains) == (explains, explains)


def test_a_reward_that_pays_less_from_one_step_to_the_next_is_the_reward(tmp_path):
    found = attribute(record(tmp_path / "run", Story(pays=drops(60, 1.0, 0.2))))
    assert found.cause == "reward"


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (2.0, -1.0), (50.0, 0.0), (10.0, -20.0)])
def test_a_fall_is_one_on_every_scale_of_rewards(scale, offset):
    chance = np.random.default_rng(7)
    level = np.where(np.arange(120) < 60, 0.8, 0.7) + 0.01 * chance.normal(size=120)
    dip = np.where(np.arange(120) < 60, 0.8, 0.77) + 0.01 * chance.normal(size=120)
    shares = []
    for values in (level, dip):
        given = dataclasses.replace(outcome(offset + scale * values), floor=min(offset, 0.0))
        shares.append(find_fall(given))
    assert shares[0] is not None
    assert shares[0].share == pytest.approx(0.125, abs=0.02)
    assert shares[1] is None


def test_beside_a_control_a_fall_is_seen_that_noise_would_hide():
    chance = np.random.default_rng(8)
    shared = 0.08 * chance.normal(size=24)
    own = outcome(np.linspace(0.8, 0.66, 24) + shared)
    sound = outcome(np.full(24, 0.8) + shared)
    assert find_fall(own) is None
    assert find_fall(own, sound) is not None
    assert find_fall(sound, sound) is None


@pytest.mark.slow
@pytest.mark.parametrize("floor", [1e-6, 1e-3])
def test_a_learning_rate_that_decays_or_warms_up_is_no_spike(tmp_path, floor):
    shapes = {
        "decay": lambda step: max(1e-3 * 0.9**step, floor * 1e-3),
        "warm-up": lambda step: 1e-3 * min(step, 40) / 40,
    }
    for name, rate in shapes.items():
        found = attribute(record(tmp_path / name, Story(reward=sliding, rate=rate)))
        optimizer = next(suspect for suspect in found.suspects if suspect.code == "optimizer")
        assert not any(each.code.startswith("learning_rate_spike") for each in optimizer.evidence)


def test_a_learning_rate_that_rises_for_good_is_a_spike(tmp_path):
    found = attribute(record(tmp_path / "run", Story(reward=sliding, rate=drops(48, 1e-4, 2e-3))))
    assert found.cause == "optimizer"


def test_without_groups_steps_are_compared(tmp_path):
    story = dataclasses.replace(CAUSES["length"], groups=False)
    assert attribute(record(tmp_path / "run", story)).cause == "length"


@pytest.mark.parametrize("says_version", [True, False])
def test_that_no_weights_were_behind_is_declared_where_the_trainer_said_its_version(tmp_path, says_version):
    story = Story(reward=FALLING, gap=drops(55, 1e-4, 0.3), says_version=says_version)
    found = attribute(record(tmp_path / "run", story))
    codes = {evidence.code for suspect in found.suspects for evidence in suspect.evidence}
    assert any(code.startswith("declared_fresh") for code in codes) == says_version
