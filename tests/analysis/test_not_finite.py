"""A run whose rewards, gradient norms or losses become NaN: the first thing that is told of it."""

import numpy as np
import pytest
from tim_trace import Recorder
from tim_trace.analysis import attribute, diagnose, report
from tim_trace.analysis.attribution.text import verdict_sentence
from tim_trace.analysis.diagnosis.text import story
from tim_trace.analysis.query import sql
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.watch.watch import Watcher

STEPS, AT, ROWS = 40, 25, 16


def recorded(path, *, share=0.0, first=AT, last=STEPS, logged=None, falls=False):
    """A run whose reward climbs, of which a share is NaN from one step to another; `logged`: name -> first step without a number."""
    draw = np.random.default_rng(0)
    with Recorder(path) as recorder:
        for step in range(1, STEPS + 1):
            reward = (draw.random(ROWS) < (0.05 if falls and step >= AT else 0.4 + 0.01 * step)).astype(float)
            logprobs = -draw.gamma(2, 0.4, (ROWS, 8))
            if first <= step <= last:
                reward[: round(share * ROWS)] = np.nan
            batch = recorder.add_sequences(
                step=step, response_ids=draw.integers(1, 50, (ROWS, 8)), reward=reward, advantage=reward - np.nan_to_num(reward).mean(),
                group_ids=[str(row // 4) for row in range(ROWS)],
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=logprobs.astype(np.float32))
            off = (logprobs + draw.normal(0, 1e-4, logprobs.shape)).astype(np.float32)
            recorder.add_scores("train", batch, logprobs=np.minimum(off, 0))
            given = {name: np.nan if step >= at else 1.0 + 0.1 * draw.random() for name, at in (logged or {}).items()}
            recorder.add_metrics(step, given)
    return path


@pytest.mark.parametrize(
    ("planted", "begins"),
    [
        ({"share": 0.6}, "reward is NaN or infinite from step 25 until the end; no collapse detected before that;"),
        ({"share": 0.5}, "No collapse detected;"),
        ({"share": 0.6, "last": STEPS - 1}, "No collapse detected;"),
        ({"share": 0.6, "first": STEPS}, "reward is NaN or infinite from step 40 until the end;"),
        ({"logged": {"loss": 30}}, "loss is NaN or infinite from step 30 until the end;"),
        ({"logged": {"loss": 31, "grad_norm": 31}}, "grad_norm and loss are NaN or infinite from step 31 until the end;"),
        (
            {"share": 0.9, "logged": {"loss": 24, "grad_norm": 25}},
            "loss is NaN or infinite from step 24 until the end, reward and grad_norm are NaN or infinite from step 25 until the end; no collapse",
        ),
        ({"share": 1.0, "first": 1}, "reward is NaN or infinite from step 1 until the end; the comparison"),
        ({"falls": True, "logged": {"loss": 24}}, "loss is NaN or infinite from step 24 until the end. "),
    ],
)  # fmt: skip
def test_the_story_begins_with_what_is_no_number_to_the_end(tmp_path, planted, begins):
    found = diagnose(recorded(tmp_path / "run", **planted))
    assert story(found).startswith(begins)
    assert list(result_json(found)["attribution"]["not_finite"]) == [
        {"series": each.series, "step": each.step} for each in found.attribution.not_finite
    ]


def test_the_sequences_of_its_first_step_are_the_next_thing_to_look_at(tmp_path):
    found = diagnose(recorded(tmp_path / "run", share=0.6))
    assert str(found.next[0]).startswith(f"tim-trace sql {tmp_path / 'run'}")
    assert f"WHERE step = {AT} ORDER BY isfinite(reward)" in str(found.next[0])
    sounding = {reading.alarm.metric: reading.first_step for reading in found.alarms.raised}
    assert sounding == {"reward": AT}


def test_the_verdict_of_a_run_that_did_not_fall_says_it_too(tmp_path):
    found = attribute(recorded(tmp_path / "run", logged={"loss": 30}))
    assert verdict_sentence(found) == (
        "loss is NaN or infinite from step 30 until the end. Nothing can be concluded from these steps. No drop in reward before that."
    )
    assert attribute(recorded(tmp_path / "sound", logged={"loss": STEPS + 1})).not_finite == ()


def test_watch_hears_it_as_diagnose_does(tmp_path):
    found = Watcher(recorded(tmp_path / "run", share=0.6)).look().alarms
    (alarm,) = (each for each in found.raised if each.alarm.metric == "reward")
    assert (alarm.first_step, alarm.last_step, alarm.num_steps, alarm.still) == (AT, STEPS, STEPS + 1 - AT, True)


def test_the_report_does_not_call_it_a_run_that_did_not_fall(tmp_path):
    path = tmp_path / "report.html"
    report(recorded(tmp_path / "run", share=0.6, logged={"loss": 30}), output=path)
    page = path.read_text(encoding="utf-8")
    assert "no collapse<" not in page
    assert "reward, loss NaN or infinite until the end" in page


def test_logprobs_that_are_no_number_sound_in_every_verb_that_names_alarms(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 7):
            batch = recorder.add_sequences(
                step=step, response_ids=[[1, 2, 3]] * 4, reward=[0.0, 1.0, 0.0, 1.0], response_mask=[[1, 1, 0]] * 4
            )
            recorder.add_scores("rollout", batch, logprobs=[[-1.0, -1.0, np.nan]] * 4)
            lost = {
                3: [[np.nan, -1.0, -1.0]] * 4,
                4: [[-np.inf, np.nan, -1.0]] + [[-1.0] * 3] * 3,
                5: [[np.nan] * 3] * 4,
            }
            recorder.add_scores("train", batch, logprobs=lost.get(step, [[-1.0] * 3] * 4))
    watched = Watcher(tmp_path / "run").look().alarms.raised
    diagnosed = diagnose(tmp_path / "run").alarms.raised
    for raised in (watched, diagnosed):
        (alarm,) = (each for each in raised if each.alarm.metric == "num_not_finite")
        assert (alarm.first_step, alarm.last_step, alarm.num_steps, alarm.still) == (3, 5, 3, False)
        assert (alarm.own, alarm.worst_step, alarm.first_value) == (8.0, 5, 4.0)


def test_a_run_of_numbers_alone_has_no_such_alarm(tmp_path):
    found = Watcher(recorded(tmp_path / "run")).look().alarms
    assert "num_not_finite" not in {each.alarm.metric for each in found.judged}


def test_sql_finds_nan_in_columns_with_one_number_per_row(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(
            step=1, response_ids=[[3]] * 3, reward=[1.0, float("nan"), 0.0], advantage=[float("nan"), 0.0, 0.0],
            rewards={"a": [1.0, float("nan"), 0.0]},
        )  # fmt: skip
        recorder.add_metrics(1, {"loss": float("nan"), "lr": 1.0})
    rows = "SELECT count(*) AS num FROM sequences WHERE isnan({})"
    for column in ("reward", "advantage", "rewards['a']"):
        assert sql(tmp_path / "run", rows.format(column)).rows == [(1,)]
    assert sql(tmp_path / "run", "SELECT name FROM metrics WHERE isnan(value)").rows == [("loss",)]
