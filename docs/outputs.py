"""Run the commands whose output README.md and docs/ show, and update the shown output.

python docs/outputs.py runs/demo runs/demo-collapse            # update; traces: make demo, make demo-collapse
python docs/outputs.py runs/demo runs/demo-collapse --check    # fail if an output is stale

A shown output is a fenced block between `<!-- begin output -->` and `<!-- end output -->`. It starts with `$ ` and the
command; the remaining lines are generated. `<!-- begin output lines 1-5 -->` shows only these lines of the output. The
commands of a page run in order in a folder with copies of the traces, so that pages do not affect each other. A page
that needs a trace that was not given is left unchanged, and its name is printed.
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
"""Maximum line length. Longer lines of output are wrapped."""

SHOWN = re.compile(
    r"^<!-- begin output(?: lines (?P<first>\d+)-(?P<last>\d+))? -->\n```\n(?P<body>.*?)```\n<!-- end output -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOutput:
    """A command and its output as shown on a page."""

    page: str
    command: str
    """The command as shown. It spans several lines if it contains a quoted argument that does."""
    output: str
    lines: slice
    """Lines of the output to show."""


def shown_outputs(page: str, text: str) -> list[ShownOutput]:
    """Return a page's shown outputs. Raises ValueError if an output does not begin with a tim-trace command."""
    return [_shown(page, match) for match in SHOWN.finditer(text)]


def _shown(page: str, match: re.Match[str]) -> ShownOutput:
    lines = match["body"].splitlines()
    if not lines or not lines[0].startswith("$ tim-trace "):
        raise ValueError(
            f"{page}: each output must begin with the command that printed it, e.g. $ tim-trace info runs/demo"
        )
    length = 1
    while '"' in lines[0] and "\n".join(lines[:length]).count('"') % 2:
        length += 1
        if length > len(lines):
            raise ValueError(f"{page}: {lines[0]} has an unclosed quote")
    chosen = slice(None) if match["first"] is None else slice(int(match["first"]) - 1, int(match["last"]))
    return ShownOutput(
        page=page,
        command="\n".join(lines[:length]).removeprefix("$ "),
        output="".join(f"{line}\n" for line in lines[length:]),
        lines=chosen,
    )


def filled(page: str, text: str, run: Callable[[str], str]) -> str:
    """Return the page with each shown output replaced by the output that `run` returns for its command."""

    def fresh(match: re.Match[str]) -> str:
        shown = _shown(page, match)
        output = "\n".join(_broken(line) for line in run(shown.command).splitlines()[shown.lines]).strip("\n")
        before = text[match.start() : match.start("body")]
        return f"{before}$ {shown.command}\n{output}\n```\n<!-- end output -->"

    return SHOWN.sub(fresh, text)


def needed_traces(page: str, text: str) -> set[str]:
    """Return the names of the traces that a page's commands read, except those that the commands write themselves."""
    commands = [re.sub(r"-o \S+", "", shown.command) for shown in shown_outputs(page, text)]
    examples = {command.removeprefix("tim-trace example runs/") for command in commands}
    return {name for command in commands for name in re.findall(r"\bruns/([\w-]+)", command)} - examples


def _broken(line: str) -> str:
    """Wrap a line that is too long for the page. If it is a name, a gap and a text, indent the rest like the text."""
    named = re.match(r"\s*(\w+\s{2,})?", line)
    indent = " " * len(named[0]) if named else ""
    broken = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(broken) if line else line


def _run(command: str, folder: Path) -> str:
    """Return what a command prints, with stdout and stderr interleaved."""
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "tim_trace", *words], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):  # 1 means that the command reported a finding
        sys.exit(f"{command}\n{done.stdout}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="the traces that the commands refer to as runs/NAME")
    parser.add_argument("--check", action="store_true", help="print stale outputs without updating them")
    given = parser.parse_args()
    stale = []
    for path in PAGES:
        page, old = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        needed = needed_traces(page, old)
        if missing := needed - {trace.name for trace in given.traces}:
            print(f"{page} was left unchanged: pass runs/{', runs/'.join(sorted(missing))} to update it")
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
        sys.exit("these outputs are stale; update them with: make outputs")


if __name__ == "__main__":
    main()
