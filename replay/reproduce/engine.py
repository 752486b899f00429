"""`tim-trace reproduce`: write the first difference between two executions as a short script."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ... import __version__
from ...schemas.errors import CannotReplay
from ...tracer.located import A, B, Divergence
from ..locate.engine import REFERENCE, locate
from ..locate.execution import Execution, Prepare
from ..locate.vllm_execution import AnyExecution
from ..recorded import RecordedRun
from .calls import NotWritable
from .script import Script, Writer
from .search import MOST_BYTES, Scope, Search, scopes

MOST_LINES = 80
MOST_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A script that shows where two executions differ."""

    a: str
    b: str
    first: Divergence | None
    """The first operator that rounding cannot explain. Without one, no script is written."""
    script: str | None
    """Path of the script, or None."""
    file: str | None
    """Path of the numbers that the script reads, or None if it needs none."""
    num_lines: int
    num_bytes: int
    """Size of the numbers' file."""
    duration_s: float
    """Time that the script took in a fresh process (seconds)."""
    output: str
    """What the script printed."""


def reproduce(
    trace: str | os.PathLike[str], *, output: str | os.PathLike[str] = "bug.py", steps: str = "-1", arm: str | None = None,
    against: str = REFERENCE, sequences: str = "8", model_factory: str | None = None, against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None, prepare_against: Prepare | None = None,
) -> Reproduction:  # fmt: skip
    executions: dict[str, AnyExecution] = {}
    found = locate(
        trace, steps=steps, arm=arm, against=against, sequences=sequences, patch="none", model_factory=model_factory,
        against_factory=against_factory, weights_from=weights_from, prepare_against=prepare_against, executions=executions,
    )  # fmt: skip
    first = found.first
    if first is None:
        return Reproduction(a=found.a, b=found.b, first=None, script=None, file=None, num_lines=0, num_bytes=0, duration_s=0.0, output="")
    for side, execution in executions.items():
        if type(execution) is not Execution:
            raise CannotReplay(f"{side}: arm {execution.arm.name} does not run a torch module per operator; use engine=hf")
    run = RecordedRun(trace, weights_from=weights_from)
    row = next(each for each in run.step(found.step) if each.seq_id == first.seq_id or first.seq_id is None)
    row_T = torch.tensor([*row.prompt_ids.tolist(), *row.response_ids.tolist()])
    why = "no smaller part of the model shows it"
    target, shortest = Path(output), 1 << 30
    for script in _scripts(executions, first, row_T):
        if len(script.text.splitlines()) > MOST_LINES:
            shortest = min(shortest, len(script.text.splitlines()))
            why = f"the shortest script has {shortest} lines"
            if os.environ.get("LONG"): print(script.text)
            continue
        num_bytes, duration_s, code, said = _run(script, target)
        if num_bytes > MOST_BYTES:
            why = f"the script's numbers take {num_bytes / 1e6:.1f} MB"
        elif code != 1 or not said.startswith("a "):
            why = f"the script exits with {code} in a fresh process"
        else:
            return Reproduction(
                a=found.a, b=found.b, first=first, script=os.fspath(target),
                file=os.fspath(target.with_suffix(".pt")) if script.file else None,
                num_lines=len(script.text.splitlines()), num_bytes=num_bytes, duration_s=duration_s, output=said,
            )  # fmt: skip
    target.unlink(missing_ok=True)
    target.with_suffix(".pt").unlink(missing_ok=True)
    raise CannotReplay(f"{first.side} {first.operator}: no script reproduces the difference: {why}")


def _scripts(executions: dict[str, AnyExecution], first: Divergence, row_T: Any) -> Iterator[Script]:
    suspect = executions[first.side]
    reference = executions[B if first.side == A else A]
    for scope in scopes(reference.model, suspect.model, first.operator):
        found = None
        with torch.no_grad():
            for found in Search(scope, row_T, first.token or 0).smallest():
                try:
                    yield Writer(scope, found, executions, first.side, _header(scope, executions)).script()
                except NotWritable:
                    if os.environ.get("DEBUG"): import traceback; traceback.print_exc()
                    continue
        if found is not None and scope.num_layers is not None:
            return  # more layers make it only longer


def _header(scope: Scope, executions: dict[str, AnyExecution]) -> str:
    return f"{scope.path or 'the model'}"


def _run(script: Script, target: Path) -> tuple[int, float, int, str]:
    target.write_text(script.text)
    file = target.with_suffix(".pt")
    file.unlink(missing_ok=True)
    if script.file:
        torch.save(script.file, file)
    start = perf_counter()
    done = subprocess.run([sys.executable, "-I", os.fspath(target)], capture_output=True, text=True, timeout=MOST_SECONDS)
    if os.environ.get("DEBUG"): print(script.text, done.stdout, done.stderr)
    return file.stat().st_size if script.file else 0, perf_counter() - start, done.returncode, done.stdout
