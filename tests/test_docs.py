import contextlib
import re
import runpy
import shlex
import sys

import click
import pytest
from builders import ROOT, in_process, run
from tim_trace import cli
from tim_trace.analysis.frameworks.registry import FRAMEWORKS
from tim_trace.schemas.layout import FOLDERS
from tim_trace.tracer.importers.formats import FORMATS
from tim_trace.tracer.importers.neutral import KNOWN

README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
FORMAT = (DOCS / "reference" / "trace-format.md").read_text()
SHOWING = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [*SHOWING, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.slow
def test_the_generated_parts_are_fresh():
    done = run(sys.executable, DOCS / "generate.py", "--check")
    assert done.code == 0, done.stderr


def test_every_command_is_in_the_readme():
    for name in cli.main.commands:
        assert f"tim-trace {name}" in README


def test_every_folder_of_a_trace_and_every_column_to_import_is_documented():
    for name in FOLDERS:
        assert re.search(rf"^  {name}/", FORMAT, re.MULTILINE), name
    for name in KNOWN:
        assert f"`{name}`" in FORMAT, name


def test_every_format_to_import_is_documented():
    page = (DOCS / "reference" / "import-formats.md").read_text()
    for name in FORMATS:
        assert f"### {name}\n" in page
        assert name in cli.main.commands["import"].help


def test_every_framework_is_in_the_page_that_lists_them():
    page = (DOCS / "reference" / "frameworks.md").read_text()
    listed = dict(re.findall(r"^\| `([\w-]+)` ([\d.]+) \|", page, re.MULTILINE))
    assert listed == {name: framework.version for name, framework in FRAMEWORKS.items()}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_that_the_product_names_is_there():
    named = run("git", "grep", "-hoE", r"docs/[a-z/-]+\.md", "--", "*.py", "*.sql", "Makefile", cwd=ROOT).stdout.split()
    assert len(named) > 10
    for name in set(named) - OF_OTHERS:
        assert (ROOT / name).exists(), name


def test_what_is_written_by_hand_stays_short():
    pages = [page.read_text() for page in SHOWING if page.name != "gpu.md"]  # benchmarks/gpu.py writes that one
    by_hand = [re.sub(r"<!-- begin.*?<!-- end", "", text, flags=re.DOTALL) for text in pages]
    assert sum(len(re.findall(r"\S*\w\S*", text)) for text in by_hand) < 30_000
    assert len(README.splitlines()) <= 110


def last_rows(page, heading, num):
    """The last `num` rows of the first table after a heading, as lists of cells, each as the integers in it."""
    table = (DOCS / "evidence" / page).read_text().partition(heading)[2].partition("\n| ")[2].partition("\n\n")[0]
    return [
        [list(map(int, re.findall(r"\d+", cell))) for cell in row.split("|")[1:-1]] for row in table.splitlines()[-num:]
    ]


def test_the_rates_of_attribute_are_those_of_the_last_four_suites():
    rows = last_rows("attribute.md", "## First looks", 4)
    sums = {
        name: sum(row[cell][0] for row in rows) for cell, name in enumerate(("alone", "beside", "top", "top_beside"), 2)
    }
    num, fallen, healthy = (sum(row[cell][at] for row in rows) for cell, at in ((2, 1), (7, 0), (7, 1)))
    index = (DOCS / "evidence" / "index.md").read_text()
    for which in ("alone", "beside"):
        right, top = sums[which], sums["top" if which == "alone" else "top_beside"]
        assert f"| {right} right ({right / num:.0%}); top suspect right in {top} ({top / num:.0%}) |" in index
    assert f"| {num} collapses in the last four suites" in index
    assert f"| {healthy} runs in the last four suites | {fallen or 'none'} reported as collapsed |" in index
    rates = f"in {sums['alone'] / num:.0%} of collapses ({sums['beside'] / num:.0%} with a baseline run)"
    assert rates in " ".join(README.split())


def test_the_rates_of_check_are_those_of_the_last_five_sets():
    table = (DOCS / "evidence" / "check.md").read_text()
    (logprobs, data) = (
        list(map(int, re.findall(r"\b\d+\b(?!%)", row.partition(f": {kind} ")[2])))
        for kind in ("logprobs", "data") for row in re.findall(rf"^\| \S+ 36 to 39, 41: {kind} .*$", table, re.MULTILINE)
    )  # fmt: skip
    index = (DOCS / "evidence" / "index.md").read_text()
    named = [row[1] + row[2] for row in (logprobs, data)]
    assert f"| {logprobs[0]} reports of wrong logprobs or samples" in index
    assert f"named in {named[0]}, called valid in {logprobs[5]} |" in index
    assert (
        f"| {data[0]} reports in the last five sets | cause or class named in {named[1]}, no fault reported in {data[5]} (rightly in {data[6]}) |"
        in index
    )
    assert f"{sum(named)} of the last {logprobs[0] + data[0]} public bug reports" in README


def test_every_folder_of_the_repository_is_in_the_tree_for_contributors():
    tracked = run("git", "ls-files", cwd=ROOT).stdout.splitlines()
    folders = {name.partition("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    assert folders
    tree = (ROOT / "CONTRIBUTING.md").read_text()
    for name in folders:
        assert re.search(rf"^{name}/", tree, re.MULTILINE), name


def commands():
    """Every command of ours that README and docs show, as page and words."""
    for page in SHOWING:
        text = re.sub(
            r"```\nUsage:.*?```", "", page.read_text(), flags=re.DOTALL
        )  # of --help, whose examples other tests run
        lines = text.replace("\\\n", " ").splitlines()
        for number, line in enumerate(lines):
            found = re.match(r"(?:    |\$ )(?:\.venv/bin/)?(tim-trace .*)", line)
            inline = [
                span for span in re.findall(r"`(tim-trace [a-z][^`]*)`", line) if span.split()[1] in cli.main.commands
            ]
            spans = [found.group(1)] if found else inline
            for command in spans:
                following = iter(lines[number + 1 :])
                while command.count('"') % 2:
                    command += " " + next(following).strip()
                yield str(page.relative_to(ROOT)), shlex.split(re.sub(r"\s#.*", "", command))[1:]


OF_OTHERS = {"docs/bitwise_parity.md"}
"""Pages of torchtitan, from which a published figure is."""

TEMPLATES = re.compile(r"[\[\]]|\.\.\.|\b[A-Z]{4,}\b")
"""In words that stand for others: [--control RUN2], FRAMEWORK."""


@pytest.mark.parametrize(("page", "words"), [pytest.param(*each, id=" ".join(each[1])) for each in commands()])
def test_every_command_that_a_page_shows_is_one(page, words):
    name, *rest = words
    command = cli.main.commands[name]
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    if len(rest) > 1 and not any(TEMPLATES.search(word) for word in rest if not word.startswith("SELECT")):
        with contextlib.suppress(click.MissingParameter):  # where a command is named for one of its options
            command.make_context(name, rest)


@pytest.mark.slow
def test_the_loop_of_one_s_own_that_a_page_shows_is_recorded_and_replayed(tmp_path):
    page = (DOCS / "start" / "own-loop.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "loop.py").write_text(code)
    done = run(sys.executable, "-W", "error", tmp_path / "loop.py", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert re.search(r"^as-recorded +3 +15 ", done.stdout, re.MULTILINE)


OUTPUTS = runpy.run_path(str(DOCS / "outputs.py"))


@pytest.mark.parametrize("page", SHOWING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_output_that_a_page_shows_is_generated_from_its_command(page):
    written_by_hand = re.sub(r"<!-- begin.*?<!-- end", "", page.read_text(), flags=re.DOTALL)
    fences = re.findall(r"^```(\w*)\n(.*?)^```", written_by_hand, re.MULTILINE | re.DOTALL)
    assert [body for language, body in fences if language not in ("python", "toml", "sh", "text")] == []
    trees = [body.splitlines() for language, body in fences if language == "text"]
    assert all(re.match(r"\s*[\w.]+/? |\S+/$|\s{8,}", line) for tree in trees for line in tree)


@pytest.mark.parametrize("page", sorted((DOCS / "answer").glob("*.md")), ids=lambda page: page.name)
def test_an_answer_begins_with_a_command_and_its_output(page):
    before, begin, _ = page.read_text().partition("<!-- begin output")
    assert begin
    assert len(before.split()) < 50


def test_the_readme_shows_outputs_each_with_its_command():
    shown = OUTPUTS["shown_outputs"]("README.md", README)
    assert len(shown) == README.count("<!-- begin output") == README.count("<!-- end output") > 1
    assert all(one.output for one in shown)


def test_what_the_readme_shows_of_the_example_is_what_its_commands_print(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(command):
        done = in_process(shlex.split(command)[1:])
        return done.stdout + done.stderr

    assert OUTPUTS["filled"]("README.md", README, run) == README


PAGE = """Before.

<!-- begin output lines 2-3 -->
```
$ tim-trace sql runs/demo "SELECT 1
    FROM steps"
stale
```
<!-- end output -->

After.
"""


def test_an_output_is_written_anew_between_its_markers_and_nothing_else_changes():
    ran = []

    def run(command):
        ran.append(command)
        return "one\ntwo\n" + "  " + "word " * 30 + "\nfour\n"

    fresh = OUTPUTS["filled"]("page", PAGE, run)
    assert ran == ['tim-trace sql runs/demo "SELECT 1\n    FROM steps"']
    output = "two\n  " + " ".join(["word"] * 23) + "\n  " + " ".join(["word"] * 7)
    assert fresh == PAGE.replace("stale", output)
    assert OUTPUTS["filled"]("page", fresh, run) == fresh


def test_a_page_needs_the_traces_that_its_commands_read():
    page = "\n\n".join(
        f"<!-- begin output -->\n```\n$ tim-trace {command}\n```\n<!-- end output -->"
        for command in ("diagnose runs/one-two --control runs/three", "report runs/one-two -o runs/four.html")
    )
    assert OUTPUTS["needed_traces"]("page", page) == {"one-two", "three"}
    example = "<!-- begin output -->\n```\n$ tim-trace example runs/three\n```\n<!-- end output -->\n\n"
    assert OUTPUTS["needed_traces"]("page", example + page) == {"one-two"}
    assert OUTPUTS["needed_traces"]("page", "none") == set()


@pytest.mark.parametrize("body", ["tim-trace info runs/demo", '$ tim-trace sql runs/demo "SELECT', ""])
def test_an_output_without_a_whole_command_is_refused(body):
    page = f"<!-- begin output -->\n```\n{body}\n```\n<!-- end output -->"
    with pytest.raises(ValueError, match="page"):
        OUTPUTS["shown_outputs"]("page", page)
