"""What a run was given and what it did: every change is listed, and the one that was planted is the cause of the fall."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from builders import ROOT, tim_trace
from shared import rest_slow
from tim_trace.analysis.attribution.attribute import attribute
from tim_trace.analysis.attribution.attribution import SUSPECTS, Suspect
from tim_trace.analysis.attribution.brief import QUESTIONS, attribution_brief
from tim_trace.analysis.attribution.text import (
    difference_sentences,
    evidence_sentence,
    note_sentences,
    verdict_sentence,
)
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.diagnosis.text import story
from tim_trace.analysis.dynamics.dynamics import dynamics
from tim_trace.analysis.facts.conditions import read_conditions
from tim_trace.analysis.facts.recorded import change_sentence, read_recorded
from tim_trace.analysis.report.report import report
from tim_trace.analysis.views import open_database
from tim_trace.tracer.recorder import Recorder

STEPS, AT, GROUPS, GROUP = 80, 50, 4, 8
"""Steps of a run, the one from which something is planted, groups of a step, and sequences of a group."""
PAIR = ("train", "rollout")


def from_at(before, after) -> Callable[[int], Any]:
    return lambda step: before if step < AT else after


def always(value) -> Callable[[int], Any]:
    return lambda step: value


def same(advantage, reward):
    return advantage


FALLS, FOUR, FIRST_TOKEN, NO_LIMIT, SAME, USUAL_RATE, ROUNDING, ONE = (
    from_at(0.9, 0.4), always(4), always(100), always(99), always(same), always(1e-3), always(1e-5), always(1.0),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run whose reward falls at AT, and what is planted there; all by step."""

    right: Callable[[int], float] = FALLS
    """Chance that a response is right."""
    prompt_length: Callable[[int], int] = FOUR
    first_prompt: Callable[[int], int] = FIRST_TOKEN
    """First token of the prompts."""
    most_tokens: Callable[[int], int] = NO_LIMIT
    advantages: Callable[[int], Callable] = SAME
    """Step -> function of the centred advantages and the rewards."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    settings_at: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are given anew at AT."""
    rate: Callable[[int], float] = USUAL_RATE
    rate_names: tuple[str, ...] = ("learning_rate",)
    gap: Callable[[int], float] = ROUNDING
    """Standard deviation of train - rollout, nats."""
    reference: Callable[[int], float] | None = None
    """Standard deviation of train - reference, nats."""
    evaluation: Callable[[int], float] | None = None
    declares_versions: bool = True
    temperature: Callable[[int], float] = ONE
    seed: int = 0


def record(path, plan: Plan = Plan()):
    """A trace of a plan. Of one seed two plans have the same draws, in the same order."""
    chance = np.random.default_rng(plan.seed)
    with Recorder(path) as recorder:
        recorder.add_hyperparameters({"adam_beta2": 0.999, **plan.settings})
        for step in range(1, STEPS + 1):
            if step == AT and plan.settings_at:
                recorder.add_hyperparameters(plan.settings_at, step=AT)
            _record_step(recorder, plan, step, chance)
    return path


def _record_step(recorder, plan, step, chance):
    rows = GROUPS * GROUP
    task = [(step * GROUPS + row // GROUP) % 16 for row in range(rows)]
    prompts = [[plan.first_prompt(step) + each] * plan.prompt_length(step) for each in task]
    right = chance.random(rows) < plan.right(step)
    lengths = np.minimum(chance.integers(4, 30, rows), plan.most_tokens(step))
    kind = chance.integers(0, 6, rows)
    ids = [[int(right[r]) + 1, int(kind[r]) + 10, *range(20, 18 + int(lengths[r]))] for r in range(rows)]
    reward = right.astype(float)
    centred = reward.reshape(GROUPS, GROUP)
    advantage = plan.advantages(step)((centred - centred.mean(1, keepdims=True)).ravel(), reward)
    batch = recorder.add_sequences(
        step=step, prompt_ids=prompts, response_ids=ids, group_ids=[str(row // GROUP) for row in range(rows)],
        policy_version=step - 1 if plan.declares_versions else None, reward=reward, advantage=advantage,
        temperature=[plan.temperature(step)] * rows,
    )  # fmt: skip
    # Likelier responses are right ones more often, as those of a policy that knows something.
    train = [-chance.gamma(2.0, 0.3 if good else 0.6, len(row)) for row, good in zip(ids, right, strict=True)]
    noise = [chance.normal(0, 1, len(row)) for row in ids]
    for name, size in (("rollout", plan.gap(step)), ("reference", plan.reference and plan.reference(step))):
        if size is not None:
            off = [np.minimum(one + size * each, 0.0) for one, each in zip(train, noise, strict=True)]
            recorder.add_scores(name, batch, logprobs=[one.tolist() for one in off])
    version = step - 1 if plan.declares_versions else None
    recorder.add_scores("train", batch, logprobs=[one.tolist() for one in train], policy_version=version)
    metrics = {
        **dict.fromkeys(plan.rate_names, plan.rate(step)),
        "grad_norm": 1 + 0.2 * chance.random(),
        "entropy": 1 + 0.05 * chance.normal(),
    }
    of_evaluation = 0.01 * chance.normal()
    if plan.evaluation is not None and step % 4 == 0:
        metrics["eval/accuracy"] = plan.evaluation(step) + of_evaluation
    recorder.add_metrics(step, metrics)


def sliding(step: int) -> float:
    """What a policy that is pulled away from where it was does, step by step."""
    return float(np.interp(step, [AT, STEPS], [0.9, 0.3]))


def flipped(advantage, reward):
    return -advantage


def tenfold(advantage, reward):
    return 10 * advantage


def without_baseline(advantage, reward):
    return reward


PLANTED = {
    "longer prompts": ("data", "prompt_length", Plan(prompt_length=from_at(4, 12))),
    "other prompts": ("data", "prompt_form_shift", Plan(first_prompt=from_at(100, 200))),
    "cut responses": ("truncation", "longest_response", Plan(most_tokens=from_at(99, 12))),
    "max_tokens": ("truncation", "max_tokens", Plan(most_tokens=from_at(30, 12), settings={"max_tokens": 30}, settings_at={"max_tokens": 12})),
    "kl coefficient": ("reference", "kl_coef", Plan(settings={"kl_coef": 0.01}, settings_at={"kl_coef": 5.0})),
    "another reference": ("unknown", "reference_k3", Plan(reference=from_at(0.1, 1.0), right=sliding)),
    "sign of advantages": ("advantages", "advantage_correlation", Plan(advantages=from_at(same, flipped))),
    "scale of advantages": ("advantages", "advantage_scale", Plan(advantages=from_at(same, tenfold))),
    "baseline": ("advantages", "advantage_mean", Plan(advantages=from_at(same, without_baseline))),
    "learning rate": ("optimizer", "learning_rate", Plan(rate=from_at(1e-3, 2e-2))),
    "temperature": ("mismatch", "temperature", Plan(settings={"temperature": 1.0}, settings_at={"temperature": 1.7})),
    "text": ("reward", "verifier", Plan(settings={"verifier": "exact"}, settings_at={"verifier": "model"})),
    "unknown": ("unknown", "frobnication", Plan(settings={"frobnication": 1.0}, settings_at={"frobnication": 2.0})),
}  # fmt: skip
"""Name -> the suspect, or `unknown` if the cause is only listed among the changes; the series that changes; the plan."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Name of what is planted -> its trace, made once."""
    made = {}

    def trace(name):
        if name not in made:
            made[name] = record(tmp_path_factory.mktemp("planted") / name.replace(" ", "_"), PLANTED[name][2])
        return made[name]

    return trace


def asked(query, *traces):
    """The rows of a query, as the command gives them."""
    return tim_trace("sql", *traces, query, "--json").json()


@pytest.mark.parametrize("name", rest_slow(PLANTED, 2))
def test_what_was_planted_is_the_cause_and_stands_first_with_its_step(traces, name):
    suspect, series, _ = PLANTED[name]
    found = attribute(traces(name))
    assert found.fall is not None
    assert next(one.code for one in found.suspects if suspect == "unknown" or one.code != "unknown") == suspect
    assert found.cause == (None if suspect == "unknown" else suspect)
    own = [
        change
        for change in found.changes
        if change.series not in (found.fall.onset_of, "share_groups_without_spread", "reward_std_within_groups")
    ]
    planted = next(change for change in own if change.series == series)
    assert (planted.step, planted.low, planted.high) == (AT, AT, AT)
    assert not planted.follows
    # Those that stand before it are the same plant, seen from another side: they are of the same kind and step.
    before = own[: own.index(planted)]
    assert {(change.kind, change.step) for change in before} <= {(planted.kind, AT), ("sampling", AT), ("setting", AT)}
    recorded = read_recorded(open_database(traces(name)), PAIR)
    assert (series, AT, AT, AT) in {(change.series, change.step, change.low, change.high) for change in recorded}


@pytest.mark.parametrize("name", rest_slow(["longer prompts", "sign of advantages"]))
def test_every_verb_names_one_onset(traces, name):
    trace = traces(name)
    fall = attribute(trace).fall
    told = json.loads(tim_trace("diagnose", trace, "--json").stdout)
    query = "SELECT step, low, high FROM changes WHERE series = 'reward'"
    (row,) = asked(query, trace)
    moved = dynamics(trace)
    (of_reward,) = (change for series in moved.series if series.name == "reward" for change in series.changes)
    subject = report([trace]).subjects[0]
    assert (row["step"], row["low"], row["high"]) == (fall.step, *fall.interval)
    assert (of_reward.step, of_reward.low, of_reward.high) == (fall.step, *fall.interval)
    assert moved.fall == subject.attribution.fall == diagnose(trace).attribution.fall == fall
    assert told["attribution"]["fall"]["step"] == fall.step
    assert f"after step {fall.step} (95% CI {fall.interval[0]}-{fall.interval[1]})" in told["story"]


@pytest.mark.slow
def test_the_view_has_numbers_and_texts_in_columns_of_their_own(traces):
    query = (
        "SELECT kind, step, before, after, before_text, after_text, size_in_sd, shape FROM changes WHERE series = '{}'"
    )
    (number,) = asked(query.format("kl_coef"), traces("kl coefficient"))
    (text,) = asked(query.format("verifier"), traces("text"))
    set_at = {"kind": "setting", "step": AT, "size_in_sd": None, "shape": "set"}
    assert number == set_at | {"before": 0.01, "after": 5.0, "before_text": None, "after_text": None}
    assert text == set_at | {"before": None, "after": None, "before_text": "exact", "after_text": "model"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sign of advantages", "scale of advantages", "baseline"])
def test_the_same_trace_has_the_same_changes_each_time(traces, name):
    first, *others = (read_recorded(open_database(traces(name)), PAIR) for _ in range(4))
    assert all(other == first for other in others)
    # What is always equal has no scatter: the order in which numbers were added is none.
    noisy = [change for change in first if change.series in ("advantage_correlation", "advantage_mean")]
    assert all(abs(change.size_in_sd) < 1e6 for change in noisy)


@pytest.mark.parametrize(("moved", "is_listed"), [(3e-7, False), (3e-3, True)])
def test_what_float32_rounds_off_a_mean_advantage_of_0_is_no_change(tmp_path, moved, is_listed):
    draw = np.random.default_rng(0)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, STEPS + 1):
            reward = draw.integers(-20, -10, 16).astype(float)
            advantage = reward - reward.mean() + (moved if step >= AT else 0.0) * (1 + 0.1 * draw.random())
            recorder.add_sequences(
                step=step, response_ids=draw.integers(1, 9, (16, 10)), reward=reward, advantage=advantage
            )
    found = {change.series for change in read_recorded(open_database(tmp_path / "run"), PAIR)}
    assert ("advantage_mean" in found) == is_listed


def test_a_mask_that_covers_more_tokens_from_a_step_on_is_listed(tmp_path):
    draw = np.random.default_rng(0)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, STEPS + 1):
            mask = np.ones((16, 10), bool)
            mask[:, 7:] = step < AT
            recorder.add_sequences(
                step=step, response_ids=draw.integers(1, 9, (16, 10)), response_mask=mask, reward=draw.random(16)
            )
    database = open_database(tmp_path / "run")
    (change,) = (one for one in read_recorded(database, PAIR) if one.kind == "mask")
    assert (change.series, change.step, change.shape) == ("share_masked", AT, "shift")
    assert (change.before, change.after) == pytest.approx((0.0, 0.3), abs=1e-6)
    rows = asked("SELECT series, step FROM changes WHERE kind = 'mask'", tmp_path / "run")
    assert rows == [{"series": "share_masked", "step": AT}]


def test_every_column_of_the_view_is_documented(traces):
    page = (ROOT / "docs" / "reference" / "sql.md").read_text(encoding="utf-8")
    section = page[page.index("## What changed") : page.index("## Named queries")]
    documented = {
        name for line in section.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`")[1::2]
    }
    assert set(open_database(traces("text")).ask("FROM changes").columns) == {"run", *documented} - {'"order"'}
    (query,) = (line.strip() for line in section.splitlines() if line.startswith("    SELECT"))
    first = open_database(traces("text")).ask(query).dicts()[0]
    assert (first["series"], first["step"]) == ("verifier", AT)


def test_the_view_holds_the_steps_that_were_asked_for(traces):
    trace, query = traces("kl coefficient"), "SELECT series FROM changes WHERE kind = 'setting'"
    until, all_of_it = open_database(trace, f"1:{AT - 1}"), open_database(trace, f"1:{AT + 10}")
    assert until.ask(query).dicts() == []
    assert all_of_it.ask(query).dicts() == [{"series": "kl_coef"}]


def test_changes_of_several_runs_are_one_view(traces):
    query = "SELECT run, series FROM changes WHERE kind = 'setting' ORDER BY run, series"
    rows = asked(query, traces("kl coefficient"), traces("max_tokens"))
    assert rows == [{"run": "kl_coefficient", "series": "kl_coef"}, {"run": "max_tokens", "series": "max_tokens"}]


def test_a_setting_that_is_given_again_as_it_was_is_no_change(tmp_path):
    again = record(
        tmp_path / "run",
        Plan(settings={"kl_coef": 0.01, "verifier": "exact"}, settings_at={"kl_coef": 0.01, "verifier": "exact"}),
    )
    assert not [change for change in read_recorded(open_database(again), PAIR) if change.kind == "setting"]


def test_a_quantity_that_is_logged_under_several_names_is_one_change(tmp_path):
    run = record(tmp_path / "run", Plan(rate=from_at(1e-3, 1e-2), rate_names=("learning_rate", "optim/lr", "lr")))
    changes = read_recorded(open_database(run), PAIR)
    assert [change.series for change in changes if change.step == AT and change.after == pytest.approx(1e-2)] == [
        "learning_rate"
    ]


def doubling(since, until):
    return lambda step: 0.01 * 2.0 ** float(np.clip(step - since + 1, 0, until - since + 1))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kl_coef", doubling(21, 30), ("kl_coef", "setting", "ramp", 21, 30, 0.01, 0.01 * 2**10)),
        ("kl_coef", doubling(21, 40), ("kl_coef", "setting", "ramp", 21, 40, 0.01, 0.01 * 2**20)),
        ("kl_coef", doubling(21, 21), ("kl_coef", "setting", "set", 21, 21, 0.01, 0.02)),
        ("kl_coef", doubling(5, 9), ("kl_coef", "setting", "ramp", 5, 9, 0.01, 0.01 * 2**5)),
        ("kl_coef", doubling(4, 9), None),  # it moves from the beginning, as a schedule does
        ("kl_coef", lambda step: 0.01 + 0.001 * (step % 3), None),
        ("optim.lr", doubling(21, 30), None),
    ],
)
def test_a_setting_that_moves_step_by_step_is_one_change_from_its_first_step_to_its_last(
    tmp_path, name, value, expected
):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 41):
            recorder.add_hyperparameters({name: value(step)}, step=step)
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * 4, response_ids=[[2, 3]] * 4, reward=[0.0, 1.0] * 2
            )
            recorder.add_scores("train", batch, logprobs=[[-1.0, -0.5]] * 4)
    found = [
        (c.series, c.kind, c.shape, c.low, c.high, c.before, pytest.approx(c.after))
        for c in read_recorded(open_database(tmp_path / "run"), PAIR) if c.kind == "setting"
    ]  # fmt: skip
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize("right", [always(0.7), from_at(0.9, 0.4), from_at(1.0, 0.4)])
def test_a_run_in_which_nothing_was_changed_has_no_change_of_what_it_was_given(tmp_path, right):
    calm = record(tmp_path / "run", Plan(right=right))
    given = ("prompts", "sampling", "advantages", "setting", "contract", "reference")
    assert not [change for change in read_recorded(open_database(calm), PAIR) if change.kind in given]


def test_a_step_of_the_first_tenth_is_not_nearer_to_it_because_it_is_a_part_of_it(tmp_path):
    """Prompts of 64 kinds, drawn alike at each of 100 steps: the first ten steps are what all are held against."""
    draw = np.random.default_rng(0)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 101):
            prompts = draw.integers(0, 4, (16, 6)).tolist()
            batch = recorder.add_sequences(
                step=step, prompt_ids=prompts, response_ids=[[2, 3]] * 16, reward=draw.random(16).tolist()
            )
            recorder.add_scores("train", batch, logprobs=[[-1.0, -0.5]] * 16)
    database = open_database(tmp_path / "run")
    series = read_conditions(database)
    assert np.isnan(series["prompt_form_shift"].values).tolist() == [True] * 10 + [False] * 90
    assert not [change for change in read_recorded(database, PAIR) if change.kind == "prompts"]


@pytest.mark.slow
def test_a_series_that_is_exactly_0_before_a_change_says_0(tmp_path):
    run = record(tmp_path / "run", Plan(right=always(0.7), gap=from_at(0.0, 0.2)))
    recorded = {change.series: change for change in read_recorded(open_database(run), PAIR)}
    for name in ("k3", "mean_abs_d", "max_abs_d"):
        assert (recorded[name].step, recorded[name].before) == (AT, 0.0)
        assert recorded[name].after > 0.01
    assert f"k3 is exactly 0 until step {AT}, then " in change_sentence(recorded["k3"])
    assert f"k3 is exactly 0 until step {AT}, then " in story(diagnose(run))
    (of_dynamics,) = (series.changes[0] for series in dynamics(run).series if series.name == "mean_abs_d")
    assert (of_dynamics.step, of_dynamics.before) == (AT, 0.0)
    (row,) = asked("SELECT before FROM changes WHERE series = 'mean_abs_d'", run)
    assert row == {"before": 0.0}


def test_an_engine_that_was_exact_until_the_fall_is_the_cause(tmp_path):
    found = attribute(record(tmp_path / "run", Plan(gap=from_at(0.0, 0.5))))
    assert found.cause == "mismatch"
    assert any(
        f"the engine was exact until step {AT}" in evidence_sentence(each) for each in found.suspects[0].evidence
    )


@pytest.mark.slow
def test_a_drop_of_the_reward_alone_is_a_drop_even_if_the_evaluation_holds(tmp_path):
    found = attribute(record(tmp_path / "run", Plan(prompt_length=from_at(4, 12), evaluation=always(0.8))))
    assert (found.outcome, found.fall.outcome, found.cause) == ("eval/accuracy", "reward", "data")
    fell = attribute(record(tmp_path / "fell", Plan(prompt_length=from_at(4, 12), evaluation=from_at(0.8, 0.3))))
    assert fell.fall.outcome == "eval/accuracy"


@pytest.mark.slow
@pytest.mark.parametrize("gap", [always(0.3), lambda step: 1e-5 if step < 5 else 0.3, from_at(1e-5, 0.4)])
def test_a_declared_lag_of_0_is_never_staleness(tmp_path, gap):
    found = attribute(record(tmp_path / "run", Plan(gap=gap)))
    (staleness,) = (suspect for suspect in found.suspects if suspect.code == "staleness")
    assert found.suspects[0] is not staleness
    assert staleness.probability < 0.2  # versions may be wrong, too


SOUND = always(0.9)


def differing(found):
    return {difference.suspect for difference in found.difference_codes}


@pytest.mark.slow
def test_a_control_that_differs_in_one_thing_is_an_intervention(tmp_path):
    run = record(tmp_path / "run", Plan(settings={"kl_coef": 5.0}))
    control = record(tmp_path / "control", Plan(right=SOUND, settings={"kl_coef": 0.0}))
    found = attribute(run, control=control)
    assert (found.kind, found.cause) == ("intervention", "reference")
    assert "reference" in differing(found)


@pytest.mark.slow
def test_a_control_that_differs_in_two_things_is_no_intervention(tmp_path):
    run = record(tmp_path / "run", Plan(settings={"kl_coef": 5.0}, gap=always(0.3)))
    control = record(tmp_path / "control", Plan(right=SOUND, settings={"kl_coef": 0.0}))
    found = attribute(run, control=control)
    assert found.kind == "observation"
    assert differing(found) == {"reference", "mismatch"}
    assert verdict_sentence(found).count("compared with another run") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("size", "differs"), [(0.002, False), (0.3, True)])
def test_a_control_without_the_rounding_of_bf16_earns_the_mismatch_nothing(tmp_path, size, differs):
    # The mean of |d| is 0.8 of its standard deviation.
    run = record(tmp_path / "run", Plan(gap=always(size / 0.8)))
    control = record(tmp_path / "control", Plan(right=SOUND, gap=always(0.0)))
    found = attribute(run, control=control)
    assert differing(found) == ({"mismatch"} if differs else set())
    assert (found.kind == "intervention") is differs
    (mismatch,) = (suspect for suspect in found.suspects if suspect.code == "mismatch")
    assert (mismatch.probability < 0.5) is not differs
    if not differs:
        assert any("no difference between the run and its baseline" in note for note in note_sentences(found))


@pytest.mark.slow
def test_a_control_lists_prompts_and_what_was_changed_near_the_fall(tmp_path):
    run = record(
        tmp_path / "run", Plan(prompt_length=from_at(4, 12), settings={"kl_coef": 0.01}, settings_at={"kl_coef": 5.0})
    )
    control = record(tmp_path / "control", Plan(right=SOUND, settings={"kl_coef": 0.01}))
    found = attribute(run, control=control)
    assert {suspect.code for suspect in found.suspects[:2]} == {"data", "reference"}
    assert difference_sentences(found) == (f"first difference at step {AT}: the prompts",)


# --- a brief ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(traces):
    return traces("longer prompts")


def test_a_brief_names_the_cause_the_facts_and_a_query_for_each_open_question(trace):
    text = tim_trace("attribute", trace, "--brief").stdout
    assert "a change in the prompts" in text
    assert "prompt_length changes from 4 to 12 at step 50" in text
    assert "SELECT step, avg(num_prompt_tokens)" in text
    (command,) = [line for line in text.splitlines() if "ORDER BY prompt_ids" in line]
    assert len(tim_trace(*shlex.split(command)[1:], "--json").json()) == 16
    assert tim_trace("diagnose", trace, "--brief").stdout.splitlines()[2:] == text.splitlines()[2:]


def test_every_suspect_has_a_question_whose_query_runs(trace):
    assert set(QUESTIONS) == set(SUSPECTS)
    found = attribute(trace)
    all_open = tuple(Suspect(code=code, evidence=(), probability=1 / 12) for code in SUSPECTS)
    lines = attribution_brief(replace(found, suspects=all_open)).splitlines()
    queries = [line.strip() for line in lines if line.startswith("    SELECT")]
    assert len(queries) == len(QUESTIONS)
    for query in queries:
        tim_trace("sql", trace, query)
    assert all(int(step) >= 0 for step in re.findall(r"BETWEEN (-?\d+)", "".join(queries)))
    (of_optimizer,) = (query for query in queries if "learning_rate" in query)
    names = {row["name"] for row in tim_trace("sql", trace, of_optimizer, "--json").json()}
    assert names == {"learning_rate", "grad_norm"}


def test_a_brief_has_at_most_4000_tokens(trace):
    found = attribute(trace)
    text = attribution_brief(replace(found, facts=found.facts * 50))
    assert len(text) < 16_000  # four letters a token
    assert "weaker: SELECT * FROM facts" in text


def test_a_run_without_a_drop_has_a_brief_and_no_facts(tmp_path):
    run = record(tmp_path / "run", Plan(right=always(0.7)))
    assert "No collapse detected" in tim_trace("attribute", run, "--brief").stdout
    assert tim_trace("sql", run, "SELECT count(*) AS num FROM facts", "--json").json() == [{"num": 0}]


def test_the_view_and_the_json_have_the_facts_strongest_first(trace):
    rows = tim_trace("sql", trace, 'SELECT code, step, before, after, "order", sentence FROM facts', "--json").json()
    (prompts,) = (row for row in rows if row["code"] == "prompts_changed")
    assert (prompts["step"], prompts["before"], prompts["after"], prompts["order"]) == (50, "4.0", "12.0", "with")
    facts = json.loads(tim_trace("attribute", trace, "--json").stdout)["facts"]
    assert [fact["sentence"] for fact in facts] == [row["sentence"] for row in rows]
    levels = [abs(fact["level"]) for fact in facts]
    assert levels == sorted(levels, reverse=True)


def test_a_brief_is_no_json(trace):
    done = tim_trace("attribute", trace, "--brief", "--json")
    assert done.code == 2
    assert "--json and --brief cannot be combined" in done.stderr
