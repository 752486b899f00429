"""Which alarms sound is one thing, whichever verb says it."""

import math

import numpy as np
import pytest
from bigrams import HOT, Recording
from builders import make_trace, tim_trace
from tim_trace.analysis.alarms.figures import read_token_figures
from tim_trace.analysis.alarms.text import alarm_sentence
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.report.page.page import page
from tim_trace.analysis.report.report import report
from tim_trace.analysis.views import open_database
from tim_trace.tracer.recorder import Recorder

PAIR = ("train", "rollout")


def spiked(path):
    """Forty calm steps but one, whose mean over the run is calm; a learning rate that spikes; a mask; a gradient of NaN."""
    draw = np.random.default_rng(0)
    with Recorder(path) as recorder:
        for step in range(1, 41):
            scale = 3.0 if step == 17 else 1e-3
            rollout = -draw.exponential(1.0, (8, 6)).astype("f4")
            added = recorder.add_sequences(
                step=step, prompt_ids=[[row, step] for row in range(8)], response_ids=draw.integers(0, 9, (8, 6)),
                reward=draw.normal(size=8), advantage=draw.normal(size=8), response_mask=np.arange(48).reshape(8, 6) % 5 > 0,
            )  # fmt: skip
            recorder.add_scores("rollout", added, logprobs=rollout)
            recorder.add_scores("train", added, logprobs=(rollout - np.abs(draw.normal(0, scale, (8, 6)))).astype("f4"))
            recorder.add_metrics(
                step, {"learning_rate": 1e-4 if step == 30 else 1e-6, "grad_norm": math.nan if step == 33 else 1.0}
            )
    return path


TRACES = {
    "calm": lambda path: make_trace(path / "run", steps=6) and path / "run",
    "hot": lambda path: HOT.write(path / "run"),
    "loud": lambda path: Recording(train=lambda step, number: step.scored(step.logits / 3)).write(path / "run"),
    "spiked": lambda path: spiked(path / "run"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no advantages recorded")  # what corrections cut is not asked here
@pytest.mark.parametrize("made", TRACES)
def test_diagnose_watch_and_the_report_name_the_same_alarms_with_the_same_figures(tmp_path, made):
    trace = TRACES[made](tmp_path)
    diagnosed = tim_trace("diagnose", trace, "--json", "-v").json()["alarms"]
    watched = tim_trace("watch", trace, "--json").json()["alarms"]
    sounding = [told for told in diagnosed["judged"] if told["is_raised"]]
    fields = ("over", "worst_step", "first_step", "last_step", "num_steps", "still")
    keys = {told["alarm"]["code"]: told for told in sounding}
    others = {told["alarm"]["code"]: told for told in watched["raised"]}
    assert keys.keys() == others.keys()
    assert (len(diagnosed["judged"]), diagnosed["not_judged"]) == (watched["num_judged"], watched["not_judged"])
    for key, told in keys.items():
        assert [told[name] for name in fields] == [others[key][name] for name in fields]
        # The one reads sums that the trace keeps and the other tokens: the order of additions differs.
        assert told["own"] == (others[key]["own"] and pytest.approx(others[key]["own"], rel=1e-12))
    size = {answer.question: answer for answer in report(trace).verdicts[0].answers}["size"]
    assert size.figure == f"{len(sounding)} of {len(diagnosed['judged'])} alerts fired"
    for reading in diagnose(trace).alarms.raised:
        assert alarm_sentence(reading) in size.detail


@pytest.mark.slow
def test_an_alarm_sounds_where_one_step_passes_its_level_and_the_mean_of_the_run_does_not(tmp_path):
    found = diagnose(spiked(tmp_path / "run"))
    by_metric = {(each.alarm.who, each.alarm.metric): each for each in found.alarms.raised}
    assert found.metrics["mean_abs_d"] < 0.8
    told = by_metric["Miles", "mean_abs_d"]
    assert (told.first_step, told.worst_step, told.num_steps, told.still) == (17, 17, 1, False)
    assert by_metric["tim-trace", "learning_rate"].worst_step == 30
    assert "Miles: mean_abs_d &gt; 0.8" in " ".join(page(report(tmp_path / "run")).split())


def test_figures_that_need_tokens_are_what_a_plain_query_gives(tmp_path):
    database = open_database(spiked(tmp_path / "run"))
    found = read_token_figures(database, PAIR)
    rows = database.ask(
        "SELECT step, avg(abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE))), avg(exp(abs(d))) "
        "FROM pair('train', 'rollout') WHERE mask GROUP BY step ORDER BY step"
    ).rows
    for place, name in enumerate(("prob_diff_mean", "mean_exp_abs_d"), 1):
        steps, values = found[name]
        assert steps.tolist() == [row[0] for row in rows]
        assert values == pytest.approx([row[place] for row in rows], rel=1e-6)


def test_a_figure_that_overflows_sounds(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1, 2]])
        recorder.add_scores("train", added, logprobs=[[-1.0, -1.0]])
        recorder.add_scores("rollout", added, logprobs=[[-1.0, -1000.0]])
    raised = {each.alarm.metric: each for each in diagnose(tmp_path / "run").alarms.raised}
    assert raised["k3"].own == math.inf
