"""The skill for coding agents: every command and query in it runs."""

import re
import shlex

import pytest
from builders import ROOT, in_process
from rich_trace import make_rich_trace

TEXT = (ROOT / "skills" / "tim-trace" / "SKILL.md").read_text()
COMMANDS = re.findall(r"^ {7}(tim-trace .*)$", TEXT, re.MULTILINE) + [
    command for command in re.findall(r"`(tim-trace [^`]*)`", TEXT) if not command.startswith(("tim-trace import", "tim-trace mcp"))
]  # fmt: skip


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skill")
    for name in ("one", "two"):
        make_rich_trace(folder / name)
    return folder


def test_the_skill_is_short_and_says_what_it_is_for():
    assert len(TEXT.splitlines()) <= 80
    name, description = re.fullmatch(r"---\nname: (.+)\ndescription: (.+)\n---\n.*", TEXT, re.DOTALL).groups()
    assert name == "tim-trace"
    assert len(description) <= 1024
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_skill_runs(traces, command):
    places = {"RUN": str(traces / "one"), "OTHER": str(traces / "two")}
    _, *words = [places.get(word, word.replace("step = 121", "step = 2")) for word in shlex.split(command)]
    done = in_process(words)
    assert done.code in (0, 1), done.stderr
    assert done.stdout
