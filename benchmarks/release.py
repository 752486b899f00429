"""Build a release, install it in new environments, run every verb there, and write the tables of docs/evidence/costs.md.

    python benchmarks/release.py FOLDER python3.11 python3.12 python3.13

Builds what is committed. FOLDER, which must not exist, then takes 4 GB. Sizes are of the wheels that pip chooses:
packed, and unpacked without bytecode.
"""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "costs.md"
RECORD = ROOT / "requirements-record.txt"
LOOP_PAGE = ROOT / "docs" / "start" / "own-loop.md"
PIP = (sys.executable, "-m", "pip")
EXTRAS = ("mcp", "ray", "s3", "tensorboard", "wandb")
"""Extras without torch."""
TRAINING = ("trl==1.16.*", "verl==0.9.1", "torch transformers")
LOOP = ("torch==2.13.0", "numpy", "transformers>=5.10,<5.20")
"""What the program of docs/start/own-loop.md needs."""
FIRST_TRY = ("example runs/example", "diagnose runs/example", "report runs/example -o runs/example.html")
FINDING = 1


def main():
    _, folder, *pythons = sys.argv
    folder = Path(folder).absolute()
    folder.mkdir(parents=True)
    wheel = built(pythons[0], folder)
    rows = [installed(python, folder / python.rpartition("/")[2], wheel) for python in pythons]
    *_, calls = rows[-1]
    heads = "Python | `pip install` | again, cached | `example` | `diagnose` | `report` | calls"
    write("install", heads, [(*row, outcome(calls)) for *row, calls in rows])
    base = wheels(folder / "base", wheel)
    extras = [(each, *size(wheels(folder / each, f"{wheel}[{each}]"), base)) for each in EXTRAS]
    write("extras", "extra | packages | download | unpacked", [("(none)", *size(base)), *extras])
    record = wheels(folder / "record", wheel, "-r", RECORD, "--no-deps")
    heads = "environment | packages added | download | unpacked | packages changed"
    write("record", heads, [(f"`{training}`", *added(training, record)) for training in TRAINING])
    write("libraries", "libraries imported | commands", by_libraries(calls))
    record_loop(folder, wheel, pythons[0])


def built(python, folder):
    """Return the wheel built from the source distribution; a wheel built from the tree must hold the same."""
    run("git", "clone", "--quiet", ROOT, folder / "source")
    tools = venv(python, folder / "tools")
    run(tools, "-m", "pip", "install", "--quiet", "build", "twine")
    run(tools, "-m", "build", "--outdir", folder / "dist", folder / "source")
    run(tools, "-m", "build", "--wheel", "--outdir", folder / "direct", folder / "source")
    run(tools, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir())
    (wheel,), (direct,) = ((folder / name).glob("*.whl") for name in ("dist", "direct"))
    first, second = ({(each.filename, each.CRC) for each in zipfile.ZipFile(one).infolist()} for one in (wheel, direct))
    assert {name for name, _ in first ^ second} <= {f"{wheel.name.rsplit('-', 3)[0]}.dist-info/RECORD"}, first ^ second
    return wheel


def venv(python, folder):
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def installed(python, folder, wheel):
    """Install a wheel twice, try it as README does, and run every verb; return the times and the calls."""
    cache, seconds = {"PIP_CACHE_DIR": str(folder / "cache")}, []
    for attempt in ("first", "second"):
        here = venv(python, folder / attempt)
        seconds.append(run(here, "-m", "pip", "install", "--quiet", wheel, env=cache)[1])
    for words in FIRST_TRY:
        seconds.append(run(here.parent / "tim-trace", *words.split(), cwd=folder, may_find=True)[1])
    lines, _ = run(here, ROOT / "tests" / "programs" / "every_verb.py", cwd=folder)
    version, _ = run(here, "-c", "import platform; print(platform.python_version())")
    return version.strip(), *seconds, [json.loads(line) for line in lines.splitlines()]


def outcome(calls):
    """Return how many calls answered, asked for an extra, or said that the example has no weights."""
    refused = [call["error"] for call in calls if call["code"] not in (0, FINDING)]
    extra = [error for error in refused if "tim-trace[" in error]
    weights = [error for error in refused if "WeightsMissing" in error or "has no weights" in error]
    assert len(extra) + len(weights) == len(refused), refused
    return f"{len(calls) - len(refused)} answer, {len(extra)} name an extra, {len(weights)} miss weights"


def wheels(folder, *what):
    """Return the wheels that pip chooses."""
    run(*PIP, "download", "--quiet", "--dest", folder, *what)
    return {path.name: path for path in folder.iterdir()}


def size(chosen, without=()):
    """Return the number of wheels, and their size packed and unpacked."""
    paths = [path for name, path in chosen.items() if name not in without]
    packed = sum(path.stat().st_size for path in paths)
    unpacked = sum(each.file_size for path in paths for each in zipfile.ZipFile(path).infolist())
    return str(len(paths)), f"{packed / 1e6:.0f} MB", f"{unpacked / 1e6:.0f} MB"


def added(training, record):
    """Return what recording adds to an environment, and which of its packages it would change."""
    report, _ = run(*PIP, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *training.split())
    found = [each["metadata"] for each in json.loads(report)["install"]]
    there = {canonicalize_name(each["name"]): each["version"] for each in found}
    wanted = [Requirement(line) for line in RECORD.read_text().splitlines() if not line.startswith("#")]
    pairs = [(each.specifier, there[name]) for each in wanted if (name := canonicalize_name(each.name)) in there]
    changed = sum(version not in specifier for specifier, version in pairs)
    return *size(record, [name for name in record if canonicalize_name(name.partition("-")[0]) in there]), str(changed)


def record_loop(folder, wheel, python):
    """Run the program of docs/start/own-loop.md where only what it and recording need is installed."""
    here = venv(python, folder / "loop")
    run(here, "-m", "pip", "install", "--quiet", *LOOP)
    run(here, "-m", "pip", "install", "--quiet", "--no-deps", wheel, "-r", RECORD)
    (program,) = re.findall(r"```python\n(.*?)```", LOOP_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "loop.py").write_text(program.replace(", replay, stats", "").partition("\nprint(")[0])
    run(here, folder / "loop.py", cwd=folder)
    print(run(next(folder.glob("*/second/bin/tim-trace")), "stats", "runs/loop", cwd=folder)[0])


def by_libraries(calls):
    """Return the commands that answered by what they import."""
    groups = {}
    for call in calls:
        if call["libraries"] is not None and call["code"] in (0, FINDING) and "--json" not in call["call"]:
            groups.setdefault(", ".join(call["libraries"]) or "none of these", {})[f"`{call['call']}`"] = None
    return [(libraries, ", ".join(groups[libraries])) for libraries in sorted(groups, key=len)]


def run(*command, cwd=None, env=None, may_find=False):
    """Run a command without PYTHONPATH. Return what it prints, and its wall and CPU time."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (env or {})
    begin, used = time.monotonic(), getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in ((0, FINDING) if may_find else (0,)):
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stdout}")
    now = getrusage(RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return done.stdout, f"{time.monotonic() - begin:.1f} s ({cpu_s:.1f} s CPU)"


def write(name, heads, rows):
    """Write a table between its markers on the page."""
    heads = heads.split(" | ")
    lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
