"""A verb leaves a trace as it was, unless the first lines of its help and of its docstring say that it writes into it."""

import inspect
import re
import shutil

import pytest
import tim_trace
from builders import in_process, make_trace
from located import ROWS, make_run
from tim_trace import cli
from verbs import HEAVY, WORDS, words_of

MAKES_TRACES = {"example", "record", "import"}
FUNCTIONS = {"export": "export_run"}
MORE = {
    "gate": ["--fail-on", "tim.k3>1"],
    "gradient": ["--loss", "kind=ppo_clip,clip_high=0.28,aggregation=token_mean"],
    "locate": ["--sequences", "1", "--patch", "none"],
}
"""What has a verb go all of its ways."""
SAYS_SO = r"\b(writes?|stores?)\b[^.]*\b(in (it|the trace)|as pass)\b"


@pytest.fixture(scope="module")
def replayable(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("replayable") / "run", num_steps=1, advantage=[1.0, -1.0] * (ROWS // 2))


@pytest.fixture
def trace(request, tmp_path, verb):
    if verb in HEAVY:
        return shutil.copytree(request.getfixturevalue("replayable"), tmp_path / "run")
    make_trace(tmp_path / "run")
    return tmp_path / "run"


def listing(trace):
    return {
        str(path.relative_to(trace)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in trace.rglob("*")
        if path.is_file()
    }


def first_lines(text):
    return " ".join(" ".join(inspect.cleandoc(text).split("\n\n")[:2]).split())


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=pytest.mark.slow if verb in {"certify", "gradient", "reproduce"} else ())
        for verb in sorted(WORDS.keys() - MAKES_TRACES)
    ],
)
def test_a_verb_writes_into_a_trace_only_where_its_first_lines_say_so(tmp_path, trace, verb):
    before = listing(trace)
    done = in_process([*words_of(verb, run=trace, new=tmp_path / "new"), *MORE.get(verb, ())])
    assert done.code in (0, 1) or verb == "weights", done.stderr  # the trace has none
    writes = listing(trace) != before
    assert bool(re.search(SAYS_SO, first_lines(cli.main.commands[verb].help), re.I)) == writes
    assert bool(re.search(SAYS_SO, first_lines(getattr(tim_trace, FUNCTIONS.get(verb, verb)).__doc__), re.I)) == writes
