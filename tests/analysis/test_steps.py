"""`steps` of a verb: numbers are those of a trace with these steps alone; a verdict keeps what the rest of the run shows."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from builders import add_step, make_batch, make_trace
from builders import tim_trace as command
from shared import rest_slow
from tim_trace import attribute, check, corrections, diagnose, dynamics, objective, report, stats
from tim_trace.analysis.diagnosis.text import diagnosis_text
from tim_trace.analysis.report.page.page import page
from tim_trace.analysis.stats import likeness
from tim_trace.analysis.trace.columns import read_hyperparameters
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder

LAST, ROWS = 14, 8
CHOSEN = {"5:": range(5, LAST + 1), "5:11": range(5, 12), "4:12:2": range(4, 13, 2), "-3:": range(LAST - 2, LAST + 1)}


def write(path: Path, steps=range(1, LAST + 1)) -> str:
    """A run whose engine differs starting at step 5, whose mismatch grows and whose evaluation falls."""
    with Recorder(path) as recorder:
        recorder.add_loss(Loss(clip_low=0.1, clip_high=0.3))
        if 1 in steps:
            recorder.add_metrics(0, {"eval/reward": 0.1})
        for step in steps:
            recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16" if step < 5 else "float16"})
            recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
            batch = make_batch(ROWS, seed=step, longest=30)
            batch["current"] = [t - np.float32(0.01 * step) for t in batch["train"]]
            groups = [str(row // 4) for row in range(ROWS)]
            names = [f"{step}-{row}" for row in range(ROWS)]
            passes = ("rollout", "train", "current")
            add_step(recorder, step, batch, passes, seq_ids=names, group_ids=groups)
            recorder.add_metrics(step, {"loss": 0.5 * step, "grad_norm": 1.0 + step % 3, "eval/reward": 1.0 / step})
    return str(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trace = write(tmp_path_factory.mktemp("whole") / "run")
    stats(trace)  # sums of all steps are kept from here on
    return trace


@pytest.fixture(scope="module", params=rest_slow(CHOSEN, 2))
def both(request, whole, tmp_path_factory):
    """(all steps, those of the choice alone, the choice)."""
    part = write(tmp_path_factory.mktemp("part") / "run", CHOSEN[request.param])
    stats(part)  # a quantile that was kept may differ in its last digit from one that is computed
    return whole, part, request.param


def told(result, trace, steps="all"):
    """A result without the name of its trace, and as if it had been asked of all steps."""
    text = repr(result).replace(f" --steps {steps}", "")
    chosen = r" WHERE step BETWEEN \d+ AND \d+( AND step IN \([\d, ]+\))?\)"  # in the SQL of a next step
    text = re.sub(rf"\(FROM sequences{chosen}", "sequences", text)
    text = re.sub(rf"\(FROM (pair\([^)]+\)){chosen}", r"\1", text)
    for name in ("steps", "steps_asked"):
        text = text.replace(f"{name}={steps!r}", f"{name}='all'")
    return text.replace(trace, "RUN")


def assert_close(found, expected):
    """Rows are equal but for the last digits of sums, which are added in another order."""
    assert found.columns == expected.columns
    assert len(found) == len(expected)
    for row, wanted in zip(found.rows, expected.rows, strict=True):
        for value, other in zip(row, wanted, strict=True):
            assert value == (pytest.approx(other, rel=1e-12) if isinstance(other, float) else other)


@pytest.mark.parametrize("by", rest_slow(["run", "step", "sequence"], 2))
def test_stats_of_some_steps_are_those_of_a_trace_with_these_alone(both, by):
    whole, part, steps = both
    assert stats(whole, by=by, steps=steps).rows == stats(part, by=by).rows


@pytest.mark.slow
def test_the_numbers_of_a_framework_are_of_the_chosen_steps(both):
    whole, part, steps = both
    for like in ("verl", "trl"):
        found = stats(whole, like=like, by="step", steps=steps)
        assert found.rows == stats(part, like=like, by="step").rows
        assert likeness(whole, like=like, steps=steps) == likeness(part, like=like)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["run", "step", "length"])
def test_corrections_of_some_steps_are_those_of_a_trace_with_these_alone(both, by):
    whole, part, steps = both
    assert_close(corrections(whole, by=by, steps=steps), corrections(part, by=by))


@pytest.mark.parametrize("verb", rest_slow([check, objective], 2))
def test_a_verdict_on_some_steps_is_that_on_a_trace_with_these_alone(both, verb):
    whole, part, steps = both
    assert told(verb(whole, steps=steps), whole, steps) == told(verb(part), part)


def test_a_diagnosis_of_some_steps_is_that_of_a_trace_with_these_alone(both):
    whole, part, steps = both
    found, expected = diagnose(whole, steps=steps), diagnose(part)
    for field in ("numerics", "metrics", "size", "figures", "alarms", "replays"):
        assert getattr(found, field) == getattr(expected, field), field


def test_the_numbers_of_dynamics_over_some_steps_are_those_of_a_trace_with_these_alone(both):
    whole, part, steps = both
    found, expected = dynamics(whole, steps=steps), dynamics(part)
    assert (found.first_step, found.last_step, found.num_steps) == (
        expected.first_step,
        expected.last_step,
        expected.num_steps,
    )
    for one, other in zip(found.series, expected.series, strict=True):
        assert dataclasses.replace(one, changes=()) == dataclasses.replace(other, changes=())


FALL, BROKEN, END = 40, 35, 70


def incident(path: Path, recovers: int | None = None, rate_jumps: int | None = None, has_gap: bool = False) -> str:
    """A run that learns until its baseline becomes another group's mean; some steps later its reward drops."""
    draw, groups, size = np.random.default_rng(0), 8, 8
    with Recorder(path) as recorder:
        for step in range(1, END + 1):
            is_low = step >= FALL and (recovers is None or step < recovers)
            reward = (draw.random((groups, size)) < (0.1 if is_low else 0.7)).astype(float)
            mean = reward.mean(1, keepdims=True)
            baseline = mean if step < BROKEN else np.roll(mean, 1, axis=0)
            advantage = (reward - baseline) / (reward.std(1, ddof=1, keepdims=True) + 1e-4)
            batch = recorder.add_sequences(
                step=step,
                prompt_ids=[[step, 100 + row // size] for row in range(groups * size)],
                response_ids=draw.integers(10, 60, (groups * size, 6)).tolist(),
                group_ids=[str(row // size) for row in range(groups * size)],
                reward=reward.ravel(),
                advantage=advantage.ravel(),
            )
            train = -draw.gamma(2.0, 0.4, (groups * size, 6))
            gap = 0.2 if has_gap and step >= BROKEN else 1e-5
            recorder.add_scores("train", batch, logprobs=train.tolist())
            recorder.add_scores(
                "rollout", batch, logprobs=np.minimum(train + draw.normal(0, gap, train.shape), 0.0).tolist()
            )
            rate = 1e-6 if rate_jumps is None or step < rate_jumps else 1e-5
            recorder.add_metrics(step, {"learning_rate": rate, "grad_norm": 1.0 + 0.1 * draw.random()})
    return str(path)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return incident(tmp_path_factory.mktemp("broken") / "run")


@pytest.mark.parametrize("steps", rest_slow(["30:45", "45:60", "20:60:5"]))
def test_a_collapse_known_from_the_whole_run_is_the_answer_for_a_part_of_it(broken, steps):
    known = attribute(broken)
    assert known.cause == "advantages"
    found = attribute(broken, steps=steps)
    assert (found.fall, found.cause, found.steps) == (known.fall, "advantages", steps)
    diagnosed = diagnose(broken, steps=steps)
    assert (diagnosed.attribution.fall, diagnosed.attribution.cause) == (known.fall, "advantages")
    assert dynamics(broken, steps=steps).fall == known.fall
    assert "No collapse" not in f"{diagnosed}{found}"


def test_a_collapse_after_the_selected_steps_is_named_and_not_the_answer(broken):
    fall = attribute(broken).fall
    found, diagnosed = attribute(broken, steps="1:20"), diagnose(broken, steps="1:20")
    assert (found.fall, found.later, diagnosed.attribution.later) == (None, fall, fall)
    said = f"fter the selected steps, reward collapses after step {fall.step}"
    assert said in str(found)
    assert said in str(diagnosed)
    assert said in str(dynamics(broken, steps="1:20"))


def test_a_drop_from_which_a_run_recovers_is_found_up_to_the_selected_steps(tmp_path):
    trace = incident(tmp_path / "run", recovers=52)
    assert attribute(trace).fall is None
    found = attribute(trace, steps="30:50")
    assert found.fall.low <= FALL <= found.fall.interval[1]
    assert dynamics(trace, steps="30:50").fall == found.fall


def test_changes_within_some_steps_are_those_of_the_whole_run(broken):
    changes = {one.name: one.changes for one in dynamics(broken).series}
    found = dynamics(broken, steps="36:44")
    assert any(one.changes for one in found.series)
    for one in found.series:
        assert one.changes == tuple(each for each in changes[one.name] if each.low <= 44 and each.high >= 36)
    assert "Too short" not in str(found)


def test_a_jump_of_the_mismatch_before_the_selected_steps_stays_known(tmp_path):
    trace = incident(tmp_path / "run", recovers=FALL, has_gap=True)
    assert [change.step for change in diagnose(trace, steps="40:60").jumps] == [BROKEN]
    assert diagnose(trace, steps="10:30").jumps == ()


def test_a_rule_that_needs_the_level_before_knows_the_steps_before_the_selected_ones(tmp_path):
    trace = incident(tmp_path / "run", recovers=FALL, rate_jumps=30)
    (raised,) = [each for each in diagnose(trace, steps="32:45").alarms.raised if each.alarm.metric == "learning_rate"]
    assert raised.first_step == 32
    assert not [each for each in diagnose(trace, steps="10:25").alarms.raised if each.alarm.metric == "learning_rate"]


def test_the_first_screen_of_a_diagnosis_names_faults_of_the_data(broken):
    text = diagnosis_text(diagnose(broken, steps="30:39"))
    assert f"the baseline is not the group's mean, starting at step {BROKEN}" in text
    calm = diagnosis_text(diagnose(broken, steps="1:20"))
    assert "baseline" not in calm


def test_a_control_is_compared_over_the_same_steps(broken, tmp_path):
    found = attribute(broken, control=incident(tmp_path / "run", recovers=FALL), steps="30:45")
    assert found.fall is not None
    assert found.fall.step == pytest.approx(FALL, abs=2)


@pytest.mark.slow
def test_a_report_of_some_steps_shows_what_one_of_a_trace_with_these_alone_does(both):
    whole, part, steps = both
    found, expected = report(whole, steps=steps), report(part)
    assert found.subjects[0].attribution.fall == attribute(whole).fall
    of_found, of_expected = found.subjects[0], expected.subjects[0]
    assert [row["contract"] for row in of_found.contracts] == [row["contract"] for row in of_expected.contracts]
    assert (of_found.info.num_steps, of_found.info.num_sequences) == (
        of_expected.info.num_steps,
        of_expected.info.num_sequences,
    )
    assert [one.key for one in found.charts] == [one.key for one in expected.charts]
    for one, other in zip(found.run, expected.run, strict=True):
        for line, wanted in zip(one.lines, other.lines, strict=True):
            assert line.x.tolist() == wanted.x.tolist(), one.key
            assert line.y.tolist() == wanted.y.tolist(), one.key
    facts = dict(found.provenance[0].facts)
    assert steps in facts["steps"]
    assert "steps" not in dict(expected.provenance[0].facts)


@pytest.mark.slow
def test_what_a_report_offers_to_copy_is_of_its_steps(whole):
    made = report(whole, steps="5:11")
    for answer in made.verdicts[0].answers:
        assert "--steps 5:11" in answer.command
    for one in made.charts:
        assert "--steps 5:11" in one.sql or "step BETWEEN 5 AND 11" in one.sql, one.key
    database = open_database(whole)
    for one in made.run:
        if not one.sql.startswith("tim-trace"):
            rows = database.ask(one.sql).rows
            assert [row[0] for row in rows] == list(range(5, 12)), one.key
            assert [row[1] for row in rows] == pytest.approx(one.lines[0].y.tolist()), one.key
    assert ">5:11<" in page(made)


def test_commands_of_a_check_are_of_its_steps(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 9):
            batch = make_batch(64, seed=step, longest=40)
            batch["train"] = [np.roll(r, 1) for r in batch["rollout"]] if step > 4 else batch["train"]
            add_step(recorder, step, batch)
    found = check(tmp_path / "run", steps="5:")
    asked = [each.next.command for each in found.findings if each.next.command]
    assert asked
    for line in asked:
        if " sql " in line:
            assert "step BETWEEN 5 AND 8" in line
        elif " stats " in line:
            assert "--steps 5:" in line


def test_sums_of_some_steps_are_not_kept_as_those_of_all(tmp_path):
    make_trace(tmp_path / "run", steps=6)
    stats(tmp_path / "run", steps="2:3")
    assert not (tmp_path / "run" / "sums").exists() or not [*(tmp_path / "run" / "sums").iterdir()]
    assert (
        stats(tmp_path / "run").dicts()[0]["num_tokens"] > stats(tmp_path / "run", steps="2:3").dicts()[0]["num_tokens"]
    )


def test_steps_apply_to_each_of_several_traces(tmp_path):
    make_trace(tmp_path / "a", steps=6)
    make_trace(tmp_path / "b", steps=3)
    found = stats([tmp_path / "a", tmp_path / "b"], by="step", steps="-2:")
    assert [(row["run"], row["step"]) for row in found.dicts()] == [("a", 5), ("a", 6), ("b", 2), ("b", 3)]
    with pytest.raises(InvalidOption, match=r"steps: '5:' matches no recorded step of b \(recorded: 1 to 3\)"):
        stats([tmp_path / "a", tmp_path / "b"], steps="5:")


@pytest.mark.slow
def test_a_choice_of_no_step_names_the_option(whole):
    for verb in ("stats", "check", "diagnose", "corrections", "objective", "attribute", "dynamics"):
        done = command(verb, whole, "--steps", "99:")
        assert done.code == 2, verb
        assert done.stderr.strip() == "Error: --steps: '99:' matches no recorded step (recorded: 0 to 14)", verb
    done = command("report", whole, "-o", f"{whole}.html", "--steps", "99:")
    assert done.stderr.strip() == "Error: --steps: '99:' matches no recorded step (recorded: 0 to 14)"


def test_a_choice_of_steps_without_sequences_names_the_option(whole):
    for verb in (stats, check, diagnose, corrections, objective):
        with pytest.raises(NothingToCompare, match="steps='0' selects steps without"):
            verb(whole, steps="0")


def test_settings_hold_from_the_step_that_they_were_recorded_at(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_hyperparameters({"beta": 0.5})
        for step in (1, 2, 3):
            recorder.add_sequences(step=step, response_ids=[[1]], reward=[1.0])
    assert read_hyperparameters(open_database(tmp_path / "run", "2:")) == {"beta": 0.5}


def test_a_table_of_stats_takes_steps_on_the_command_line(whole):
    rows = command("stats", whole, "--by", "step", "--steps", "3:4", "--json").json()
    assert [row["step"] for row in rows] == [3, 4]
