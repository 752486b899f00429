"""Real training runs and real engines, each started once for all tests that look at it."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from builders import PROGRAMS, Finished, run, tim_trace
from shared import made_once


@dataclass
class Run:
    """A program that ran, with what it told and, when it was recorded, its trace."""

    done: Finished
    result: dict
    trace: Path | None


HAS_AMX = "amx" in Path("/proc/cpuinfo").read_text()


def program(name, *arguments, capture=None, fraction="1.0", env=(), options=()):
    """Run one of tests/programs, recorded when `capture` is given; the same run once a session."""

    def make(folder):
        command = [
            sys.executable,
            PROGRAMS / name,
            "--model",
            folder / "model",
            "--result",
            folder / "result.json",
            *arguments,
        ]
        if capture:
            own = ["-o", folder / "run", "--capture", capture, "--capture-fraction", fraction, *options]
            done = tim_trace("record", *own, "--", *command, env=dict(env), cwd=folder)
        else:
            done = run(*command, env=dict(env), cwd=folder)
        said = done.stdout + done.stderr
        if done.code and ("died unexpectedly (exit code: -4)" in said or ("EngineDeadError" in said and HAS_AMX)):
            pytest.skip(
                "vLLM's worker dies of an illegal instruction here, bare as well: CPUs with AMX, in a process of its own"
            )
        assert done.code == 0, done.stderr[-3000:]
        (folder / "done.json").write_text(json.dumps(asdict(done)))

    folder = made_once((name, arguments, capture, fraction, env, options), make)
    done = Finished(**json.loads((folder / "done.json").read_text()))
    return Run(done, json.loads((folder / "result.json").read_text()), folder / "run" if capture else None)


def train(*arguments, config=None, **options):
    """Train with TRL."""
    settings = ["--config", json.dumps(config)] if config else []
    return program("train.py", *arguments, *settings, **options)
