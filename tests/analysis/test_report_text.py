"""The Markdown of a report, and its figures as objects."""

import re
from dataclasses import replace

import numpy as np
import pytest
import tim_trace
from builders import tim_trace as command
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tim_trace.analysis.markdown import escaped, fenced, table_lines
from tim_trace.analysis.report.markdown import report_markdown
from tim_trace.schemas.errors import InvalidOption

HOSTILE = "a|b `c` <img src=x onerror=alert(1)> [x](javascript:y) @someone #12 *b* __init__ ~~s~~ $x$ &lt; \x1b[2J\n# h"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "example"
    tim_trace.example(folder)
    return folder


@pytest.fixture(scope="module")
def made(example):
    return tim_trace.report(example)


def renamed(made, text):
    """A report in which every text that may be long is `text`."""
    verdict = made.verdicts[0]
    answers = tuple(replace(answer, short=text, figure=text) for answer in verdict.answers)
    return replace(
        made, subjects=(replace(made.subjects[0], name=text),),
        verdicts=(replace(verdict, headline=text, answers=answers),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_abs_d of a run", "max_abs_d of a run"),
        ("a|b", r"a\|b"),
        ("`<b>` [x](y)", r"\`\<b>\` \[x\](y)"),
        ("*a* __init__ ~~s~~ $1 &amp;", r"\*a\* \_\_init\_\_ \~\~s\~\~ \$1 \&amp;"),
        ("two\nlines\t\\", r"two\\x0alines\\x09\\"),
        ("@me and #12, C#", "@\u2060me and #\u206012, C#"),
    ],
)
def test_text_in_markdown_stays_text(text, shown):
    assert escaped(text) == shown


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_a_fence_and_a_table_hold_whatever_is_in_them():
    assert fenced("echo '```'") == ["````sh", "echo '```'", "````"]
    lines = table_lines(["a", "b"], [[escaped("|"), escaped("x | y")]])
    assert [cells(line) for line in lines] == [["a", "b"], ["--", "---"], [r"\|", r"x \| y"]]


def test_markdown_has_the_verdict_the_commands_and_the_series(made):
    lines = report_markdown(made).splitlines()
    verdict = made.verdicts[0]
    assert lines[0] == "### tim-trace: example"
    assert lines[2] == f"**{verdict.headline}**"
    rows = [cells(line) for line in lines if line.startswith("|")]
    assert rows[0] == ["question", "answer", "figure"]
    assert [row[1][2:] for row in rows[2:7]] == [escaped(answer.short) for answer in verdict.answers]
    assert [row[2] for row in rows[2:7]] == [escaped(answer.figure) for answer in verdict.answers]
    fence = lines.index("```sh")
    assert lines[fence + 1 : lines.index("```", fence)] == [str(each) for each in verdict.next]
    k3 = made.run[0].lines[0].y
    assert rows[9][0] == "Mismatch k3 (nats)"
    assert rows[9][1:] == [f"{value:.4g}" for value in (k3[0], k3[-1], k3.min(), k3.max())] + ["91"]
    assert {len(row) for row in rows[7:]} == {6}


def test_markdown_of_two_runs_has_a_column_each(made, tmp_path):
    text = report_markdown(replace(made, subjects=made.subjects * 2, verdicts=made.verdicts * 2))
    rows = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["question", "example", "example"]
    assert "Series by step of example:" in text


def test_hostile_text_of_a_trace_is_no_markup_in_markdown(made):
    text = report_markdown(renamed(made, HOSTILE))
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)[<`]|@s|#1|(?<!\\)\[|\x1b", outside.replace("### ", ""))
    assert {len(cells(line)) for line in text.splitlines() if line.startswith("|")} == {3}
    assert [line for line in text.splitlines() if line.startswith("#")] == [text.splitlines()[0]]


def test_the_command_writes_markdown_or_prints_it(example, made, tmp_path):
    written = command("report", example, "--markdown", tmp_path / "out.md")
    assert written.code == 0, written.stderr
    assert (tmp_path / "out.md").read_text(encoding="utf-8") == report_markdown(made)
    printed = command("report", example, "--markdown", "-")
    assert printed.stdout == report_markdown(made)
    assert "wrote" not in printed.stderr


def test_python_prints_markdown_too(example, made, capsys):
    tim_trace.report(example, markdown="-")
    assert capsys.readouterr().out == report_markdown(made)


@pytest.mark.slow
def test_figures_are_those_that_report_writes_and_can_be_changed(example, tmp_path):
    figures = tim_trace.figures(example)
    tim_trace.report(example, png=tmp_path / "figures")
    assert set(figures) == {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert all(isinstance(figure, Figure) for figure in figures.values())
    reward = figures["reward"]
    (axes,) = reward.axes
    assert np.isclose(max(axes.lines[0].get_ydata()), 0.5303, atol=1e-4)
    axes.add_line(Line2D([1, 130], [0.5, 0.5]))
    reward.savefig(tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 5000


def test_figures_take_the_options_of_a_report(example):
    assert tim_trace.figures(example, width=5, steps="1:50")["k3"].get_figwidth() == 5
    with pytest.raises(InvalidOption, match="width: got 'wide'"):
        tim_trace.figures(example, width="wide")
