"""A verb that reads a trace leaves it as it was, unless the first lines of its help say that it writes into it."""

import re

import pytest
from builders import in_process, make_trace
from tim_trace import cli
from verbs import HEAVY, WORDS, words_of

MAKES_TRACES = {"example", "record", "import"}
MORE = {"gate": ["--fail-on", "tim.k3>1"]}
"""What has a verb go all of its ways."""


def listing(trace):
    return {
        str(path.relative_to(trace)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in trace.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("verb", sorted(WORDS.keys() - HEAVY - MAKES_TRACES))
def test_a_verb_that_reads_writes_into_a_trace_only_where_its_first_lines_say_so(tmp_path, verb):
    make_trace(tmp_path / "run")
    before = listing(tmp_path / "run")
    done = in_process([*words_of(verb, run=tmp_path / "run", new=tmp_path / "new"), *MORE.get(verb, ())])
    assert done.code in (0, 1) or verb == "weights", done.stderr  # the trace has none
    first_lines = " ".join(cli.main.commands[verb].help.split("\n\n")[:2])
    assert (listing(tmp_path / "run") != before) == bool(
        re.search(r"\b(writes? (sums )?into|stores? (the|per-sequence) sums)\b", first_lines, re.I)
    )
