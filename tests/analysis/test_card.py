"""The card and the Markdown of a report, and its figures as objects."""

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import tim_trace
from builders import make_trace
from builders import tim_trace as command
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from reported import make_run
from tim_trace.analysis.markdown import escaped, fenced, table_lines
from tim_trace.analysis.report.markdown import report_markdown
from tim_trace.analysis.report.paper.card import SIZE, card
from tim_trace.schemas.errors import FileThere, InvalidOption
from tim_trace.tracer.recorder import Recorder

HOSTILE = "a|b `c` <img src=x onerror=alert(1)> [x](javascript:y) @someone #12 *b* __init__ ~~s~~ $x$ &lt; \x1b[2J\n# h"
NAMES = (
    "x" * 5000,
    "many words " * 400,
    "\u8bad\u7ec3\u8fd0\u884c" * 90,
    "$\\frac{$ \U0001f525 \u202e\x00",
    "",
    "a\nb",
)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "example"
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


def boxes(figure):
    """The boxes of all text that is drawn, and of the axes, in pixels."""
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (axes.xaxis.label, axes._left_title))]
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    inside = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]
    return [*(axes.get_window_extent() for axes in figure.axes), *inside]


def overlap(one, other):
    return min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 4


def check_card(figure):
    found = boxes(figure)
    assert tuple(figure.get_size_inches() * figure.dpi) == SIZE
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= SIZE[0] and box.y1 <= SIZE[1] for box in found)
    assert [pair for pair in combinations(found, 2) if overlap(*pair)] == []
    return [text.get_text() for text in figure.texts]


def test_a_card_is_a_png_of_1200_by_630_pixels(example, tmp_path):
    done = command("report", example, "--card", tmp_path / "card.png")
    assert done.code == 0, done.stderr
    assert "wrote" in done.stderr
    with Image.open(tmp_path / "card.png") as image:
        assert (image.size, image.format) == ((1200, 630), "PNG")
        assert len(np.unique(np.asarray(image.convert("L")))) > 50
    with pytest.raises(FileThere):
        tim_trace.report(example, card=tmp_path / "card.png")
    with pytest.raises(InvalidOption, match=r"card: got 'card.jpg'; the card is a PNG file"):
        tim_trace.report(example, card="card.jpg")


def test_a_card_shows_the_headline_the_answers_and_the_collapse(made):
    figure = card(made)
    texts = check_card(figure)
    verdict, text = made.verdicts[0], " ".join(texts)
    assert verdict.headline in text
    assert all(answer.short in text for answer in verdict.answers)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Mismatch k3, nats", "Reward"]
    fall = made.subjects[0].attribution.fall.step
    for axes in figure.axes:
        vertical = [line for line in axes.lines if len(line.get_xdata()) == 2 and len(set(line.get_xdata())) == 1]
        assert [line.get_xdata()[0] for line in vertical] == [fall]
    assert figure.axes[-1].get_xlabel() == f"step (vertical line: collapse at step {fall})"


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:9]))
def test_no_text_leaves_its_place_on_a_card_however_long_it_is(made, name):
    texts = check_card(card(renamed(made, name)))
    assert not re.search("[^ -~\u2713\u2715]", "".join(texts))
    if len(name) > 200:
        assert sum(text.endswith("...") for text in texts) == 7


@pytest.mark.slow
def test_a_card_of_several_runs_names_their_lines(made, example, tmp_path):
    make_run(tmp_path / "run")
    figure = card(tim_trace.report([tmp_path / "run", example]))
    texts = check_card(figure)
    assert texts[0] == "run, example"
    assert [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()] == ["run", "example"]


def record_curves(path):
    with Recorder(path) as recorder:
        for step in range(1, 61):
            recorder.add_metrics(step, {"reward": 0.5 if step < 40 else 0.1, "grad_norm": 1.0 + step % 5})


@pytest.mark.parametrize(
    ("make", "titles"),
    [
        (record_curves, ["Reward", "Gradient norm"]),
        (lambda path: make_run(path, num_steps=1), []),
        (lambda path: make_trace(path, passes=("rollout",)), None),
        (lambda path: Recorder(path).close(), []),
    ],
    ids=["curves", "one step", "one pass", "empty"],
)
def test_a_card_of_a_run_that_lacks_much_has_what_there_is(tmp_path, make, titles):
    make(tmp_path / "run")
    made = tim_trace.report(tmp_path / "run")
    figure = card(made)
    assert made.verdicts[0].headline.split()[0] in " ".join(check_card(figure))
    if titles is not None:
        assert [axes.get_title(loc="left") for axes in figure.axes] == titles


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
    figures = tim_trace.figures(example, title=True)
    tim_trace.report(example, png=tmp_path / "figures", title=True)
    assert set(figures) == {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert all(isinstance(figure, Figure) for figure in figures.values())
    reward = figures["reward"]
    (axes,) = reward.axes
    assert axes.get_title(loc="left") == "Reward"
    assert np.isclose(max(axes.lines[0].get_ydata()), 0.5303, atol=1e-4)
    axes.add_line(Line2D([1, 130], [0.5, 0.5]))
    reward.savefig(tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 5000


def test_figures_take_the_options_of_a_report(example):
    assert tim_trace.figures(example, width=5, steps="1:50")["k3"].get_figwidth() == 5
    with pytest.raises(InvalidOption, match="width: got 'wide'"):
        tim_trace.figures(example, width="wide")
