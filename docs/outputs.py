"""Run the commands whose output README.md and docs/ show, and write their output anew.

python docs/outputs.py runs/demo runs/demo-collapse            # write them; the traces of make demo and make demo-collapse
python docs/outputs.py runs/demo runs/demo-collapse --check    # fail when they are stale

A shown output is one fence between `<!-- begin output -->` and `<!-- end output -->`. Its first lines are the command after
`$ `, and what follows is generated. `<!-- begin output lines 1-5 -->` shows these lines of the output alone. The commands
of a page run in order in a folder with copies of the traces, so that no page changes what another shows. A page about a trace
that is not given stays as it is, and is named.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 120
"""Columns from which on a line of text is broken."""

SHOWN = re.compile(
    r"^<!-- begin output(?: lines (?P<first>\d+)-(?P<last>\d+))? -->\n```\n(?P<body>.*?)```\n<!-- end output -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOutput:
    """A command and its output, as a page shows them."""

    page: str
    command: str
    """As it is shown, over several lines where a quoted word has some."""
    output: str
    lines: slice
    """Which lines of the output are shown."""


def shown_outputs(page: str, text: str) -> list[ShownOutput]:
    """The shown outputs of a page. Raises ValueError for one that does not begin with a command of tim-trace."""
    return [_shown(page, match) for match in SHOWN.finditer(text)]


def _shown(page: str, match: re.Match[str]) -> ShownOutput:
    lines = match["body"].splitlines()
    if not lines or not lines[0].startswith("$ tim-trace "):
        raise ValueError(f"{page}: an output begins with its command, as: $ tim-trace info runs/demo")
    length = 1
    while '"' in lines[0] and "\n".join(lines[:length]).count('"') % 2:
        length += 1
        if length > len(lines):
            raise ValueError(f"{page}: {lines[0]} has a quote that does not end")
    chosen = slice(None) if match["first"] is None else slice(int(match["first"]) - 1, int(match["last"]))
    return ShownOutput(
        page=page,
        command="\n".join(lines[:length]).removeprefix("$ "),
        output="".join(f"{line}\n" for line in lines[length:]),
        lines=chosen,
    )


def filled(page: str, text: str, run: Callable[[str], str]) -> str:
    """The page with every shown output as `run` gives it for the command."""

    def fresh(match: re.Match[str]) -> str:
        shown = _shown(page, match)
        output = "\n".join(_broken(line) for line in run(shown.command).splitlines()[shown.lines]).strip("\n")
        before = text[match.start() : match.start("body")]
        return f"{before}$ {shown.command}\n{output}\n```\n<!-- end output -->"

    return SHOWN.sub(fresh, text)


def needed_traces(page: str, text: str) -> set[str]:
    """Names of the traces that the commands of a page read, without what they write."""
    commands = [re.sub(r"-o \S+", "", shown.command) for shown in shown_outputs(page, text)]
    examples = {command.removeprefix("tim-trace example runs/") for command in commands}
    return {name for command in commands for name in re.findall(r"\bruns/([\w-]+)", command)} - examples


def _broken(line: str) -> str:
    """A line in several where it is too long for the page, below its second column where it begins with a name."""
    named = re.match(r"\s*(\w+\s{2,})?", line)
    indent = " " * len(named[0]) if named else ""
    broken = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(broken) if line else line


def _run(command: str, folder: Path) -> str:
    """What a command prints, stdout and stderr in the order of printing."""
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "tim_trace", *words], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):  # 1 is a finding
        sys.exit(f"{command}\n{done.stdout}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="the traces that the commands name, as runs/NAME")
    parser.add_argument("--check", action="store_true", help="say which outputs are stale, and write nothing")
    given = parser.parse_args()
    stale = []
    for path in PAGES:
        page, old = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        needed = needed_traces(page, old)
        if missing := needed - {trace.name for trace in given.traces}:
            print(f"{page} stays as it is, without runs/{', runs/'.join(sorted(missing))}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for trace in given.traces:
                if trace.name in needed:
                    shutil.copytree(trace, Path(folder) / "runs" / trace.name)
            new = filled(page, old, partial(_run, folder=Path(folder)))
        befores, afters = (shown_outputs(page, text) for text in (old, new))
        stale += [after for before, after in zip(befores, afters, strict=True) if before != after]
        if old != new and not given.check:
            path.write_text(new, encoding="utf-8")
    for shown in stale:
        print(f"{shown.page}: $ {shown.command}\n{shown.output}")
    if stale and given.check:
        sys.exit("these are stale; write them anew with: make outputs")


if __name__ == "__main__":
    main()
