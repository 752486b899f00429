import csv
import io
import os
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from builders import ROOT
from matplotlib.cbook import is_math_text
from PIL import Image
from tim_trace.analysis.report.chart import LOG, Band, Bar, BarChart, Heatmap, Line, LineChart, Mark
from tim_trace.analysis.report.paper.figure import WIDTHS, draw, paper_style, plain, stack_of, wrapped
from tim_trace.analysis.report.paper.files import figures_of, rows_of, write_figures
from tim_trace.analysis.rows import to_csv
from tim_trace.schemas.errors import FileThere, InvalidOption, StorageError

NAN, INF = float("nan"), float("inf")
HOSTILE = (
    "$\\frac{$",
    "$a_1$ of 100 % {x}^2 \\alpha \\$",
    "_hidden",
    "two\nlines\tand\x00\x1b[31m more",
    "\u8bad\u7ec3 \u0417\u0430\u043f\u0443\u0441\u043a \u0634\u0628\u0643\u0629 \U0001f525 \ud800",
    "",
    "long/" * 100,
    "$" * 301,
)


def line(y, *, x=None, name="run", is_side=False):
    x = np.arange(len(y)) if x is None else x
    return Line(name=name, x=np.asarray(x), y=np.asarray(y, float), is_side=is_side)


def series(*lines, key="k3", title="Mismatch k3", **more):
    return LineChart(key=key, title=title, unit="nats", note="", sql="", lines=lines, x_label="step", **more)


def density(counts, curves=()):
    counts = np.asarray(counts)
    return Heatmap(
        key="d-by-probability", title="d", unit="tokens", note="", sql="", x_label="p", y_label="d, nats", counts=counts,
        x_edges=np.linspace(0, 1, counts.shape[1] + 1), y_edges=np.linspace(-0.3, 0.3, counts.shape[0] + 1), curves=curves,
    )  # fmt: skip


def shares(**groups):
    return BarChart(key="arms", title="Removed", unit="share", note="", sql="", x_label="share removed", groups=groups)


def read(one):
    """The rows of a chart's CSV, as a reader of it has them."""
    return list(csv.DictReader(io.StringIO("".join(f"{line}\n" for line in to_csv(rows_of(one))), newline="")))


def bits(values):
    return np.array([float(value) for value in values], np.float64).tobytes()


def drawn(one):
    """A chart's pixels."""
    file = io.BytesIO()
    draw(one).savefig(file, format="png")
    return np.asarray(Image.open(file).convert("RGB"))


def examples():
    ramp = line([1e-5, 2e-4, NAN, 3e-3, 0.1])
    marks = (Mark(x=3, low=2, high=4, text="jumps at step 3 (2 to 4): 0 to 1"),)
    k3 = series(ramp, line([1e-5] * 5, name="bf16", is_side=True), y_scale=LOG, marks=marks, bands=(Band(low=1e-5, high=1e-3, text="published"),))  # fmt: skip
    loss = series(line([1.5]), key="loss", title="Loss")
    bars = shares(removed=(Bar(name="bf16", value=0.9, low=0.8, high=0.95), Bar(name="fp64", value=-0.1)))
    cells = density([[0, 3], [1, 900]], (line([0.2, 0.0], x=[0.0, 1.0], name="99 % within"),))
    return figures_of((k3, loss, cells, bars), (k3, loss))


def test_the_table_of_lines_has_every_bit():
    values = [0.1, 1 / 3, 5e-324, -1.7976931348623157e308, NAN, INF, np.float32(0.1)]
    rows = read(series(line(values), line(values[::-1], name='a, "b"\nc'), marks=(Mark(x=4, low=2.5, high=5, text="jumps"),)))  # fmt: skip
    points = [row for row in rows if row["what"] == "line"]
    assert [row["line"] for row in points] == ["run"] * 7 + ['a, "b"\nc'] * 7
    assert bits(row["x"] for row in points) == bits([*range(7), *range(7)])
    assert bits(row["y"] for row in points) == bits(values + values[::-1])
    assert [(row["x"], row["low"], row["high"], row["text"]) for row in rows[14:]] == [("4", "2.5", "5", "jumps")]


def test_the_table_of_a_density_has_every_cell_with_tokens():
    one = density([[0, 2**53, 0], [7, 0, 1]], (line([0.1, 0.0], x=[0.0, 1.0], name="99 %"),))
    cells = [row for row in read(one) if row["what"] == "cell"]
    counts = np.zeros_like(one.counts)
    for row in cells:
        x, y = one.x_edges.tolist().index(float(row["x_low"])), one.y_edges.tolist().index(float(row["y_low"]))
        assert (float(row["x_high"]), float(row["y_high"])) == (one.x_edges[x + 1], one.y_edges[y + 1])
        counts[y, x] = int(row["tokens"])
    assert np.array_equal(counts, one.counts)
    assert len(cells) == 3
    assert [(row["line"], row["x"], row["y"]) for row in read(one)[3:]] == [
        ("99 %", "0.0", "0.1"),
        ("99 %", "1.0", "0.0"),
    ]


def test_ticks_that_differ_far_behind_the_point_are_told_apart():
    one = LineChart(
        key="ess", title="ESS", unit="", note="", sql="", x_label="step", lines=(line(1 - np.arange(9) * 1e-12),)
    )
    figure = draw(one)
    figure.draw_without_rendering()
    texts = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(set(texts)) == len(texts) > 2


def test_the_tables_of_shares_and_the_run_have_every_number():
    (bar,) = read(shares(cut=(Bar(name="tis", value=1 / 3, low=0.1 + 0.2, text="says"),)))
    assert bar == {
        "group": "cut",
        "name": "tis",
        "value": repr(1 / 3),
        "low": repr(0.1 + 0.2),
        "high": "",
        "text": "says",
    }
    k3 = series(line([0.5, NAN]))
    assert read(stack_of([k3])) == [{"chart": "k3"} | row for row in read(k3)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the examples in every format."""
    folder = tmp_path_factory.mktemp("written")
    for kind in ("png", "svg", "pdf"):
        write_figures(examples(), folder / kind, kind)
    return folder


@pytest.mark.slow
def test_pictures_have_the_width_of_a_column_or_of_a_page_and_show_something(written):
    keys = ("arms", "d-by-probability", "k3", "loss", "run")
    names = sorted(path.name for path in (written / "png").iterdir())
    assert names == [f"{key}.{kind}" for key in keys for kind in ("csv", "png")]
    for key in keys:
        with Image.open(written / "png" / f"{key}.png") as image:
            assert image.width == (1400 if key == "run" else 680)
            assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
            assert len(image.convert("RGB").getcolors(1 << 20)) > 20


def test_a_pdf_has_no_pixels_and_its_numbers_beside_it(written):
    for one in examples():
        content = (written / "pdf" / f"{one.key}.pdf").read_bytes()
        assert len(re.findall(rb"/Type /Page\b", content)) == 1
        assert b"/Subtype /Image" not in content
        assert (written / "pdf" / f"{one.key}.csv").read_text().splitlines() == list(to_csv(rows_of(one)))


def test_an_svg_has_no_pixels_and_its_numbers_beside_it(written):
    assert not (written / "svg" / "k3.png").exists()
    names = {path.name for path in (written / "svg").iterdir()}
    assert names == {f"{one.key}.{kind}" for one in examples() for kind in ("csv", "svg")}
    for one in examples():
        assert (written / "svg" / f"{one.key}.csv").read_bytes() == (written / "png" / f"{one.key}.csv").read_bytes()
        content = (written / "svg" / f"{one.key}.svg").read_text()
        assert "<image" not in content


@pytest.mark.parametrize(("width", "column", "page"), [("icml", 3.25, 6.75), ("4.5", 4.5, 4.5), (5, 5.0, 5.0)])
def test_figures_have_the_width_that_is_asked_for(tmp_path, width, column, page):
    style = paper_style(width)
    k3, run = series(line([1.0, 2.0])), stack_of([series(line([1.0, 2.0]))])
    assert (draw(k3, style).get_figwidth(), draw(run, style).get_figwidth()) == (column, page)
    write_figures([k3], tmp_path, "pdf", style=style)
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", (tmp_path / "k3.pdf").read_bytes())
    assert float(box[1]) == pytest.approx(column * 72)


@pytest.mark.parametrize("width", ["", "wide", "nan", 1.99, 20.01, -3.4, None])
def test_a_width_that_is_none_is_refused_with_those_there_are(width):
    with pytest.raises(InvalidOption, match=r"width: got .*2 to 20 inches.*neurips"):
        paper_style(width)


def test_widths_stay_within_what_a_number_may_be():
    for column, page in WIDTHS.values():
        assert 2 <= column <= page <= 20
    assert paper_style("2.0").column == 2.0
    assert paper_style(20).page == 20.0


def test_bins_that_hold_what_is_beyond_say_so():
    cells = density([[0, 3], [1, 900], [2, 2]])
    assert [text.get_text() for text in draw(cells).axes[0].texts] == ["beyond, above", "beyond, below"]


PROGRAM = """
import sys
sys.path[:0] = {folders!r}
import test_paper
from tim_trace.analysis.report.paper.files import write_figures
for kind in ("png", "svg", "pdf"):
    write_figures(test_paper.examples(), sys.argv[1] + "/" + kind, kind)
print("matplotlib.pyplot" in sys.modules)
"""


@pytest.mark.slow
def test_the_same_report_has_the_same_bytes_in_another_process_at_another_time(written, tmp_path):
    folders = [str(ROOT.parent), str(ROOT / "tests"), str(ROOT / "tests" / "analysis")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folders=folders), tmp_path], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1", "PYTHONPATH": str(ROOT.parent)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    there, here = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")} for folder in (tmp_path, written)
    )
    assert len(there) == 3 * 2 * len(examples())  # a figure and its values as CSV, in each of three formats
    assert there == here


def test_the_settings_of_the_reader_neither_change_a_figure_nor_are_changed(written, tmp_path):
    mine = {"font.size": 20.0, "axes.grid": False, "lines.linewidth": 9.0, "savefig.dpi": 30.0}
    with matplotlib.rc_context(mine):
        (_, image) = write_figures([one for one in examples() if one.key == "k3"], tmp_path, "png")
        assert {name: matplotlib.rcParams[name] for name in mine} == mine
    assert image.read_bytes() == (written / "png" / "k3.png").read_bytes()


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_one_line_of_text_and_no_formula(name):
    text = plain(name)
    assert not is_math_text(text)
    assert text.replace("\\$", "$").isprintable()
    assert not any(is_math_text(line) for line in wrapped(name, 40).splitlines())
    assert len(text.replace("\\$", "$")) <= 60


def test_a_name_that_can_be_drawn_is_drawn_as_it_is():
    assert plain("a_1 {x} 100 % \\alpha") == "a_1 {x} 100 % \\alpha"
    assert plain("$a$") == "\\$a\\$"
    assert plain("\u8bad\x1b\U0001f9ff") == "\\u8bad\\x1b\\U0001f9ff"


def test_hostile_names_are_drawn_and_written_everywhere(tmp_path):
    lines = [line([1.0, 2.0], name=name) for name in HOSTILE]
    bars = tuple(Bar(name=name, value=0.5) for name in HOSTILE)
    one = series(*lines, title=HOSTILE[1], marks=(Mark(x=1, low=1, high=1, text=HOSTILE[0]),))
    given = (one, shares(**{HOSTILE[0]: bars, HOSTILE[2]: bars}))
    write_figures(figures_of(given, (one,)), tmp_path, "pdf")
    legend = draw(one).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()][1:3] == [plain(HOSTILE[1], 46), " _hidden"]
    with (tmp_path / "k3.csv").open(newline="", encoding="utf-8") as file:
        names = dict.fromkeys(row["line"] for row in csv.DictReader(file) if row["what"] == "line")
    assert list(names) == [name.replace("\ud800", "\\ud800") for name in HOSTILE]


@pytest.mark.slow
def test_what_cannot_be_drawn_is_left_out_and_the_rest_is_drawn():
    steps = np.arange(3)
    odd = [
        series(),
        series(line([]), line([1.0], name="one")),
        series(line([NAN, NAN, NAN]), y_scale=LOG),
        series(line([0.0, -1.0, 0.0]), y_scale=LOG, x_scale=LOG),
        series(line([INF, 1.0, -INF], x=steps)),
        series(line([-1e300, 1e300, 5e-324], x=steps)),
        series(line([2.0, 2.0, 2.0]), y_scale=LOG),
        density(np.zeros((3, 4), int)),
        shares(),
        shares(cut=()),
        shares(cut=(Bar(name="a", value=NAN, low=NAN, high=1.0), Bar(name="b", value=INF, low=0.1, high=0.2))),
    ]  # fmt: skip
    for one in (*odd, stack_of([one for one in odd if isinstance(one, LineChart)])):
        assert drawn(one).shape[1] == (1400 if one.key == "run" else 680)


def test_a_value_moves_the_picture():
    assert not np.array_equal(drawn(series(line([1.0, 2.0, 1.0]))), drawn(series(line([1.0, 2.0, 1.1]))))
    assert not np.array_equal(drawn(density([[0, 5], [1, 0]])), drawn(density([[0, 500], [1, 0]])))


def test_many_lines_differ_in_colour_or_in_dashes():
    axes = draw(series(*(line([1.0, place], name=f"{place}", is_side=place > 20) for place in range(36)))).axes[0]
    looks = {(each.get_color(), str(each.get_linestyle()), each._unscaled_dash_pattern, each.get_linewidth()) for each in axes.lines if each.get_linestyle() != "None"}  # fmt: skip
    assert len(looks) == 36


def test_each_mark_has_its_step_and_marks_side_by_side_do_not_cover_one_another():
    marks = tuple(Mark(x=x, low=x - 2, high=x + 2, text="") for x in (50, 51, 52, 90))
    axes = draw(series(line(np.arange(100)), marks=marks)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["50", "51", "52", "90"]
    heights = [text.xyann[1] for text in axes.texts]
    assert len(set(heights[:3])) == 3
    assert heights[3] == heights[0]


def test_a_line_has_one_colour_in_every_panel_of_the_run():
    both, second = series(line([1.0, 2.0]), line([2.0, 1.0], name="other")), series(line([3.0, 4.0], name="other"))
    first, last = draw(stack_of([both, second])).axes
    assert first.lines[2].get_color() == last.lines[0].get_color() != first.lines[0].get_color()


def test_the_run_shows_every_step_of_its_longest_series():
    figure = draw(
        stack_of([series(line(np.ones(10)), marks=(Mark(x=5, low=4, high=6, text=""),)), series(line(np.ones(100)))])
    )
    for axes in figure.axes:
        assert axes.get_xlim()[0] <= 0
        assert axes.get_xlim()[1] >= 99


def test_files_that_are_there_stay_unless_forced(tmp_path):
    charts = (series(line([1.0, 2.0])),)
    (tmp_path / "k3.csv").write_text("mine")
    with pytest.raises(FileThere, match=r"k3\.csv is an existing file; .*force=True"):
        write_figures(charts, tmp_path, "png")
    assert [path.name for path in tmp_path.iterdir()] == ["k3.csv"]
    write_figures(charts, tmp_path, "png", force=True)
    assert (tmp_path / "k3.csv").read_text() != "mine"


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="does not exist"):
        write_figures((series(line([1.0])),), tmp_path / "file" / "figures", "svg")
    with pytest.raises(StorageError, match="cannot be written"):
        write_figures((series(line([1.0])),), tmp_path / "file", "svg")
    with pytest.raises(StorageError, match="local folder"):
        write_figures((), "s3://bucket/a", "pdf")
