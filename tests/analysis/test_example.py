"""The trace that ships with tim-trace: it is whole, small, and its fault is found."""

import re

import pytest
import tim_trace
from builders import ROOT, in_process
from tim_trace.analysis.attribution.text import attribution_text
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.example import example
from tim_trace.analysis.verify import verify
from tim_trace.schemas.errors import StorageError, TraceExists
from verbs import HEAVY, WORDS, answer

NO_WEIGHTS = HEAVY | {"weights"}
TAKES_NO_TRACE = {"example", "record", "import"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("example") / "run"
    example(path)
    return path


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_example_is_whole_and_says_what_it_is(tmp_path):
    told = tim_trace.example(tmp_path / "run")
    assert told == tim_trace.info(str(tmp_path / "run"))
    assert (told.state, told.exit_code, told.num_steps) == ("finished", 0, 130)
    assert (told.damaged, told.ignored) == ((), ())
    assert {name.name for name in told.passes} == {"rollout", "train", "current"}
    assert verify(tmp_path / "run").is_whole
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_the_command_names_the_next_commands_and_not_the_cause(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process(["example", "my runs/one/"])
    assert (done.code, done.stdout) == (0, "")
    first, *following = done.stderr.splitlines()
    assert first.startswith("tim-trace: wrote my runs/one/: a real GRPO run ")
    assert first.endswith(" whose reward drops")
    assert following == [
        "next: tim-trace diagnose 'my runs/one/'",
        "      tim-trace report 'my runs/one/' -o 'my runs/one.html'",
    ]
    assert not re.search("quanti|mismatch|weights|engine|step 9", done.stderr)


def test_only_a_trace_is_replaced_and_only_with_force(tmp_path):
    example(tmp_path / "run")
    before = tree(tmp_path / "run")
    with pytest.raises(TraceExists, match="replace it with"):
        example(tmp_path / "run")
    done = in_process(["example", str(tmp_path / "run")])
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert "replace it with --force" in done.stderr
    (tmp_path / "run" / "trace.json").touch()
    example(tmp_path / "run", force=True)
    assert tree(tmp_path / "run") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("important")
    with pytest.raises(TraceExists, match="exists but is not a trace"):
        example(tmp_path / "mine", force=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("path", ["s3://bucket/run", "/proc/nowhere/run"])
def test_a_place_where_it_cannot_be_written_is_named(path):
    with pytest.raises(StorageError, match=f"^{path}(: | cannot be written)"):
        example(path)


def test_the_fault_is_found_without_a_baseline(trace):
    found = diagnose(trace)
    suspect = found.attribution.suspects[0]
    assert (suspect.code, suspect.probability > 0.9) == ("mismatch", True)
    assert found.attribution.control is None
    assert [(finding.code, finding.numbers["cause"]) for finding in found.checked.findings] == [
        ("weights_differ", "quantised")
    ]
    assert (found.broken.side, found.broken.since) == ("engine", 91)
    text = str(found)
    assert re.match(
        r"mean_abs_d jumps \d+-fold at step 91, as reward drops from 0\.\d+ to 0\.\d+ after step 90 \(95% CI 90-91\)\. ",
        text,
    )
    assert "one side's weights are quantised" in text
    assert "check finds: one side's weights are quantised" in attribution_text(found.attribution)


@pytest.mark.parametrize("verb", sorted(WORDS.keys() - NO_WEIGHTS - TAKES_NO_TRACE))
def test_every_command_that_needs_no_weights_works_on_it(trace, tmp_path, verb):
    answer(verb, run=trace, new=tmp_path / "new")


@pytest.mark.parametrize("verb", ["replay", "weights"])
def test_a_command_that_needs_weights_says_so(trace, verb):
    assert "has no weights" in answer(verb, run=trace, refuses=True).stderr


def test_it_was_recorded_by_the_command_of_the_makefile_and_takes_at_most_a_megabyte(trace):
    ((steps, first),) = re.findall(
        r"^example:.*?--steps (\d+) --coarse-from (\d+)", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    recorded = tim_trace.info(str(trace)).command
    assert recorded == ("python", "examples/grpo_addition.py", "--steps", steps, "--coarse-from", first)
    assert (ROOT / "analysis" / "example.zip").stat().st_size <= 1_000_000
