"""The values of a report, and the page as a text; how it behaves in a browser is in tests/test_report_page.py."""

import copy
import json
import os
import pickle
import pty
import re
import shlex
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import tim_trace.analysis
from builders import TIM_TRACE, make_trace
from builders import tim_trace as command
from reported import NUM_STEPS, make_run
from tim_trace.analysis.advice import Advice
from tim_trace.analysis.alarms.reading import ALARMS, AlarmReadings, judge_level
from tim_trace.analysis.attribution.text import verdict_sentence
from tim_trace.analysis.diagnosis.diagnosis import Numerics, SizeComparison
from tim_trace.analysis.diagnosis.figures import FIGURES
from tim_trace.analysis.objective.verdict import Estimate
from tim_trace.analysis.report import subject
from tim_trace.analysis.report.answers import (
    BAD,
    GOOD,
    NOTICE,
    OPEN,
    QUESTIONS,
    factor_answer,
    objective_answer,
    size_answer,
)
from tim_trace.analysis.report.chart import LineChart
from tim_trace.analysis.report.mismatch_charts import grouped
from tim_trace.analysis.report.page.figures import stacked
from tim_trace.analysis.report.page.page import pack, page
from tim_trace.analysis.report.report import report
from tim_trace.analysis.report.run_charts import SERIES, _published_k3
from tim_trace.analysis.report.subject import num_steps_within, without_most_steps
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import FileThere, TraceNotFound
from tim_trace.tracer.recorder import Recorder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def made(run):
    return report(run)


@pytest.fixture(scope="module")
def html(made):
    return page(made)


def asked(run, query):
    return open_database(run).ask(query)


@pytest.mark.slow
def test_every_query_gives_the_values_of_its_figure(run, made):
    queries = {one.key: one for one in made.run if not one.sql.startswith("tim-trace")}
    assert {"k3", "p99_abs_d", "max_abs_d", "ess", "reward", "length", "grad_norm", "evaluation"} & set(queries) >= {
        "k3", "p99_abs_d", "max_abs_d", "ess", "reward", "grad_norm",
    }  # fmt: skip
    for key, one in queries.items():
        rows = asked(run, one.sql).rows
        assert [row[0] for row in rows] == one.lines[0].x.tolist(), key
        np.testing.assert_allclose([row[1] for row in rows], one.lines[0].y, rtol=1e-9, err_msg=key)


@pytest.mark.slow
def test_a_figure_s_command_is_one_that_runs(run, made):
    commands = {one.sql for one in made.charts if one.sql.startswith("tim-trace")}
    for each in commands:
        done = command(*shlex.split(each)[1:])
        assert done.code in (0, 1), done.stderr


def test_commands_run_as_a_shell_takes_them_whatever_the_trace_is_called(tmp_path):
    path = make_run(tmp_path / 'a run\'s "best" $HOME', num_steps=3)
    control = make_run(tmp_path / "control", num_steps=3)
    found = report(path, pair="current:rollout", control=control)
    commands = {answer.command for answer in found.verdicts[0].answers}
    commands |= {one.sql for one in found.charts if one.sql.startswith("tim-trace")}
    assert len(commands) >= 5
    assert all(shlex.split(each)[2] == str(path) for each in commands)
    asked = {words[1]: words for each in commands if (words := shlex.split(each))}
    assert asked["check"][3:] == ["--pair", "current:rollout"]
    assert asked["attribute"][3:] == ["--pair", "current:rollout", "--control", str(control)]


def test_an_advice_keeps_its_command_and_its_remark_apart():
    advice = Advice("tim-trace record -- X", "then: tim-trace replay RUN")
    assert advice == "tim-trace record -- X  # then: tim-trace replay RUN"
    for copied in (copy.deepcopy(advice), pickle.loads(pickle.dumps(advice))):
        assert (copied.command, copied.remark) == (advice.command, advice.remark)
    assert json.dumps([advice]) == json.dumps([str(advice)])
    assert (Advice("tim-trace info run"), Advice(remark="compare seq_id")) == ("tim-trace info run", "compare seq_id")
    assert not Advice()


def test_the_verdict_says_what_diagnose_objective_and_attribute_say(made):
    subject, verdict = made.subjects[0], made.verdicts[0]
    answers = {answer.question: answer for answer in verdict.answers}
    checked = subject.diagnosis.checked
    assert list(answers) == list(QUESTIONS)
    assert answers["validity"].severity == ("good" if checked.is_valid else "bad")
    assert f"{checked.rms_d:.3g} nats rms" in answers["validity"].figure
    assert answers["objective"].detail == " ".join(subject.objective.verdict)
    assert answers["fall"].detail == verdict_sentence(subject.attribution)
    assert verdict.next[0] in subject.diagnosis.next
    assert set(subject.info.missing) <= set(verdict.not_recorded)


def asked_run(**results):
    return SimpleNamespace(
        trace="run", asked_steps="all", pair=("train", "rollout"), part="all 9 steps", attribution=None, **results
    )


def estimate(value, low, high):
    return Estimate(name="", value=value, low=low, high=high, no_interval=None, meaning="")


@pytest.mark.parametrize(
    ("push", "interval", "size", "code", "severity"),
    [
        (0.00099, (0.0009, 0.0011), 0.00099, "negligible", GOOD),
        (0.001, (0.0009, 0.0011), 0.001, "small_push", NOTICE),
        (-0.001, (-0.0011, -0.0009), 0.001, "small_push", NOTICE),
        (0.049, (0.04, 0.06), 0.0499, "small_push", NOTICE),
        (0.049, (0.04, 0.06), 0.05, "small_push_large_noise", BAD),
        (0.05, (0.04, 0.06), 0.05, "large_push", BAD),
        (0.00099, (0.0009, 0.0011), 0.05, "large_noise", BAD),
        (0.01, (0.0, 0.02), 0.0499, "noise", GOOD),
        (0.01, (-0.01, 0.03), 0.05, "large_noise", BAD),
        (0.01, (1e-9, 0.03), 0.0499, "small_push", NOTICE),
        (0.01, (None, None), 0.0499, "undecided", GOOD),
        (0.01, (None, None), 0.05, "undecided", BAD),
    ],
)
def test_an_effect_on_the_objective_is_called_what_its_numbers_say(push, interval, size, code, severity):
    figures = {"relative_bias": estimate(push, *interval), "relative_abs_bias": estimate(size, None, None)}
    found = SimpleNamespace(
        figures=figures, verdict=(), verdict_codes=(), confidence=0.95, value=lambda name: figures[name].value
    )
    answer = objective_answer(asked_run(objective=found))
    assert (answer.code, answer.severity) == (code, severity)


@pytest.mark.parametrize(
    ("push", "interval", "free", "code", "short"),
    [
        (0.144, (0.1, 0.2), -0.183, "opposed", "bias caused by clipping"),
        (0.0109, (0.008, 0.012), -0.0379, "opposed", "bias caused by clipping"),
        (0.144, (0.1, 0.2), 0.183, "large_push", "large bias"),
        (0.0109, (-0.008, 0.012), -0.0379, "noise", "noise"),
    ],
)
def test_an_effect_whose_sign_the_clip_gives_has_no_direction(push, interval, free, code, short):
    figures = {
        "relative_bias": estimate(push, *interval), "relative_abs_bias": estimate(0.04, None, None),
        "unclipped_relative_bias": estimate(free, free - 0.01, free + 0.01),
    }  # fmt: skip
    found = SimpleNamespace(
        figures=figures, verdict=(), verdict_codes=(), confidence=0.95, value=lambda name: figures[name].value
    )
    answer = objective_answer(asked_run(objective=found))
    assert answer.code == code
    assert short in answer.short
    free_text = (
        f"{free * 100:+.3g}% without the clip (95% CI {(free - 0.01) * 100:+.3g}% to {(free + 0.01) * 100:+.3g}%)"
    )
    assert free_text in answer.figure


def test_a_report_of_a_bypassing_run_does_not_say_that_nothing_is_moved():
    found = SimpleNamespace(
        figures={"relative_bias": estimate(0.0, 0.0, 0.0)}, verdict=("x",), confidence=0.95,
        verdict_codes=(SimpleNamespace(code="in_ratio"),), value=lambda name: 0.01,
    )  # fmt: skip
    answer = objective_answer(asked_run(objective=found))
    assert (answer.code, answer.severity) == ("in_ratio", NOTICE)
    assert answer.short == "no bias, but clipping and correction weights act on the mismatch"


@pytest.mark.parametrize(
    ("level", "is_valid", "sounds", "code", "severity"),
    [
        ("within", True, False, "within", GOOD),
        ("below", True, False, "below", GOOD),
        ("equal", True, False, "equal", GOOD),
        ("above", True, False, "above", NOTICE),
        ("within", True, True, "within", NOTICE),
        ("unpublished", True, False, "unpublished", OPEN),
        ("unpublished", True, True, "unpublished", OPEN),
        ("within", False, False, "not_valid", OPEN),
        ("above", False, False, "not_valid", NOTICE),
    ],
)
def test_a_size_is_called_what_its_level_and_the_alarms_say(level, is_valid, sounds, code, severity):
    raised = tuple(judge_level(alarm, np.array([1]), np.array([1.5])) for alarm in ALARMS if alarm.metric == "k3")
    found = SimpleNamespace(
        size=SizeComparison(code=level, own=0.1, coarser="bfloat16", low=0.1, high=0.1),
        alarms=AlarmReadings(judged=raised if sounds else ()),
        checked=SimpleNamespace(
            is_valid=is_valid,
            is_compared=True,
            has_few_tokens=False,
            findings=(SimpleNamespace(title="rounding", code="rounding"),),
        ),
        unexplained_jump=None,
    )
    answer = size_answer(asked_run(diagnosis=found))
    assert (answer.code, answer.severity) == (code, severity)


@pytest.mark.parametrize(
    ("signal", "num_bytes", "basis"),
    [
        ("engine_weights", {"weights": 9}, "from weight digests"),
        ("", {}, "from logprobs and contracts"),
        ("", {"weights": 9}, "from logprobs and contracts; a replay would confirm it"),
    ],
)
def test_a_replay_is_offered_only_where_it_can_run_and_adds_something(signal, num_bytes, basis):
    first = SimpleNamespace(signal=signal, code="weights_differ", title="", effect=1.0, share=0.5, fails=True)
    unknown = (None, None)
    found = SimpleNamespace(
        checked=SimpleNamespace(findings=(first,)), settled_by=None, next=("tim-trace weights run --engine",),
        numerics=Numerics(passes=("train", "rollout"), declared=unknown, logits=unknown, values=unknown),
    )  # fmt: skip
    assert factor_answer(asked_run(diagnosis=found, info=SimpleNamespace(num_bytes=num_bytes))).basis == basis


def fallen(path, gap=0.9):
    """Record a run whose mismatch grows to `gap` at step 25 and whose reward falls at step 32."""
    draw = np.random.default_rng(1)
    with Recorder(path) as recorder:
        for step in range(1, 61):
            size = 0.01 if step < 25 else gap
            rollout = (-(0.5 + draw.exponential(0.5, (16, 5)))).astype(np.float32)
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[row, step] for row in range(16)], response_ids=draw.integers(0, 9, (16, 5)),
                reward=np.clip(draw.normal(0.8 if step < 32 or gap < 0.1 else 0.1, 0.05, 16), 0, 1), advantage=draw.normal(size=16),
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores(
                "train", batch, logprobs=(rollout - np.abs(draw.normal(0, size, rollout.shape))).astype("f4")
            )
    return path


def test_a_fall_is_named_with_its_cause_and_what_would_decide(tmp_path):
    made = report(fallen(tmp_path / "run"))
    fell = made.verdicts[0].answers[-1]
    assert fell.severity == "bad"
    assert "reward drops from" in made.verdicts[0].headline
    assert any("--control" in each for each in made.verdicts[0].next)


def first_line(text):
    """A text's first paragraph in one line."""
    return " ".join(text.split("\n\n")[0].split())


@pytest.mark.slow
@pytest.mark.parametrize("beside", [[], ["--control"], ["--steps", "1:30"]])
@pytest.mark.parametrize("gap", [0.9, 0.01])
def test_the_headline_is_the_first_line_of_diagnose(tmp_path, gap, beside):
    run = fallen(tmp_path / "run", gap)
    options = [*beside, fallen(tmp_path / "control", 0.01)] if beside == ["--control"] else beside
    told = first_line(command("diagnose", run, *options).stdout)
    reported = command("report", run, *options, "-o", tmp_path / "run.html")
    assert first_line(reported.stdout) == told
    (heading,) = re.findall(r"<h1>(.*?)</h1>", (tmp_path / "run.html").read_text().split('id="verdict"')[1], re.S)[:1]
    assert unescape(re.sub(r'<span class="tip".*?</span>|<[^>]*>', "", heading)) == told
    assert ("drops from" in told) == (gap == 0.9 and beside != ["--steps", "1:30"])


def test_the_headline_of_one_pass_says_that_there_is_nothing_to_compare(tmp_path):
    make_trace(tmp_path / "run", passes=("rollout",))
    made = report(tmp_path / "run")
    assert made.verdicts[0].headline == "No collapse detected; no pair of passes to compare."


def test_a_control_that_is_not_there_is_said(run, tmp_path):
    with pytest.raises(TraceNotFound):
        report(run, control=tmp_path / "nothing")


def test_the_page_is_whole_html_that_names_no_place_to_fetch_from(html):
    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.fetched = [], []

        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "input", "br", "wbr", "link"):
                self.open.append(tag)
            for name, value in attributes:
                if name in ("src", "href") and not (value or "").startswith("#"):
                    self.fetched.append(value)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert tags.fetched == []
    assert "default-src 'none'" in html


def test_names_that_look_like_markup_are_escaped(html):
    assert "&lt;em&gt;" in html
    for tag in ("<em>", "<u>", "<i>of the engine"):
        assert tag not in html


def test_packed_data_cannot_end_its_element():
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", pack({"text": "</script><!--\u2028\ud800"}))


def test_the_same_trace_gives_the_same_words(made, html):
    assert page(made).split("pack-figures")[0] == html.split("pack-figures")[0]


def test_series_that_never_move_are_told_in_a_line(made, html):
    assert made.constants["learning_rate"] == 1e-3
    assert "learning_rate" not in {one.key for one in made.run}
    assert f"{SERIES['learning_rate'].title} 0.001" in re.sub(r"\s+", " ", html)


@pytest.mark.slow
def test_runs_of_one_folder_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        make_trace(tmp_path / name / "trace")
    made = report([tmp_path / "a" / "trace", tmp_path / "b" / "trace"])
    assert [subject.name for subject in made.subjects] == ["a/trace", "b/trace"]
    assert [line.name for line in made.run[0].lines] == ["a/trace", "b/trace"]


@pytest.mark.slow
def test_a_file_that_lies_there_is_replaced_with_force_alone(run, tmp_path):
    target = tmp_path / "report.html"
    target.write_text("mine")
    with pytest.raises(FileThere, match="force=True"):
        report(run, output=target)
    assert target.read_text() == "mine"
    report(run, output=target, force=True)
    assert "<!DOCTYPE html>" in target.read_text(encoding="utf-8")


def test_nothing_is_written_where_there_is_no_trace(tmp_path):
    with pytest.raises(TraceNotFound):
        report(tmp_path / "none", output=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_in_a_notebook_a_report_shows_itself_in_a_frame(run):
    shown = tim_trace.analysis.report(run)._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "<!DOCTYPE" not in shown  # escaped: nothing of the page belongs to the notebook


def test_the_package_is_named_like_what_it_makes_before_and_after_it_is_imported():
    program = "import tim_trace.analysis as a; first = a.report; import tim_trace.analysis.report.report; assert a.report is first; print(callable(first))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.slow
def test_the_command_says_the_verdict_and_where_the_file_is(run, tmp_path):
    (tmp_path / "out").mkdir()
    done = command("report", run, "-o", tmp_path / "out" / "report.html")
    assert done.code == 0, done.stderr
    assert done.stdout.strip() == report(run).verdicts[0].headline
    assert "report.html" in done.stderr
    assert command("report", run).code == 2


@pytest.mark.slow
def test_in_a_terminal_the_verdict_is_wrapped_at_its_width(run, tmp_path):
    terminal, its_output = pty.openpty()
    words = [TIM_TRACE, "report", run, "-o", tmp_path / "report.html"]
    subprocess.run(words, stdout=its_output, stderr=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "40"}, check=True)
    os.close(its_output)
    shown = os.read(terminal, 1 << 16).decode().replace("\r\n", "\n")
    assert max(map(len, shown.splitlines())) <= 40
    assert " ".join(shown.split()) == report(run).verdicts[0].headline


@pytest.mark.parametrize("kind", ["png", "SVG", "pdf"])
def test_a_page_is_not_written_under_the_name_of_a_figure(run, tmp_path, kind):
    done = command("report", run, "-o", tmp_path / f"report.{kind}")
    assert f"report.{kind}: the page is HTML; write figures with --{kind.lower()} DIR" in done.stderr
    assert (done.code, list(tmp_path.iterdir())) == (2, [])


def test_a_large_run_is_read_in_part_and_says_so(run, monkeypatch):
    monkeypatch.setattr(subject, "WHOLE", 100)
    monkeypatch.setattr(subject, "MOST_TOKENS", 48 * 5)
    part, told = without_most_steps(open_database(run))
    steps = [step for (step,) in part.ask("SELECT DISTINCT step FROM sequences ORDER BY 1").rows]
    assert len(steps) == 5
    assert {1, NUM_STEPS} < set(steps)
    assert told == f"5 of {NUM_STEPS} evenly spaced steps"
    assert without_most_steps(open_database(run))[1] == told


def test_few_steps_of_a_large_run_and_many_of_a_small_one():
    assert num_steps_within(100_000_000, 100) == 10
    assert num_steps_within(57_000, 200) == 200


def test_charts_have_a_word_for_everyone(made):
    for one in made.charts:
        assert one.title
        assert len(one.note) > 20, one.key
        assert one.sql
    assert len({one.key for one in made.charts}) == len(made.charts)
    assert all(isinstance(one, LineChart) for one in made.run)


def test_the_first_and_the_last_of_the_stacked_charts_show_their_steps(made):
    hidden = [plot.xaxis[0].major_label_text_font_size == "0px" for plot in stacked(made.run)]
    assert hidden == [False, *[True] * (len(hidden) - 2), False]


def test_a_heading_stands_over_the_figures_that_there_are(made):
    keys = [one.key for one in made.mismatch]
    assert [one.key for charts in grouped(made.mismatch).values() for one in charts] == keys
    without = [one for one in made.mismatch if not one.key.startswith("d-by-p")]
    assert list(grouped(without)) == list(grouped(made.mismatch))
    assert "How the mismatch enters the loss" not in grouped(
        one for one in made.mismatch if one.key.startswith("d-by-")
    )


def test_rewards_that_are_no_numbers_are_told_and_sorted_as_none(tmp_path):

    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1,
            prompt_ids=[[1], [1], [1]],
            response_ids=[[2], [3], [4]],
            reward=[float("nan"), float("inf"), 0.5],
            advantage=[0.0, 0.0, 0.0],
        )
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=np.full((3, 1), -1.0, np.float32))
    written = page(report(tmp_path / "run"))
    assert '<td data-value="">NaN</td>' in written
    assert '<td data-value="Infinity">inf</td>' in written
    assert '<td data-value="0.5">0.5</td>' in written


def test_steps_with_a_norm_that_is_no_number_are_named(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 21):
            recorder.add_metrics(step, {"grad_norm": float("nan") if step in (7, 9) else 1.0 + step})
    (norm,) = report(tmp_path / "run").run
    assert norm.remark == "NaN or infinite at steps 7, 9."


@pytest.mark.parametrize(
    "options", [["-o", "{}/a.html"], ["--svg", "{}/figures"], ["--pdf", "{}/figures"], ["--png", "{}/figures"]]
)
def test_a_page_or_figures_in_a_folder_that_is_not_there_are_refused_and_no_folder_is_made(tmp_path, options):
    make_trace(tmp_path / "run")
    missing = tmp_path / "missing"
    done = command("report", tmp_path / "run", *(word.format(missing) for word in options))
    assert (done.code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"folder {missing} does not exist; create it, or choose another path" in done.stderr
    assert not missing.exists()


def test_the_band_of_published_mismatch_leaves_out_faults_and_other_architectures():
    figures = [SimpleNamespace(figure=figure, fits=True) for figure in FIGURES]
    run = SimpleNamespace(contracts=[], diagnosis=SimpleNamespace(figures=figures))
    (band,) = _published_k3(run)
    left_out = [each for each in FIGURES if each.metric == "k3" and (each.is_fault or each.is_mixture)]
    assert len(left_out) > 1
    assert band.high <= min(each.high for each in left_out) / 10
