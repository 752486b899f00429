"""`tim-trace record`: run a command so that every Python process in it records itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..schemas.capture import Capture
from ..schemas.clock import now
from ..schemas.errors import InvalidOption
from ..schemas.layout import WRITERS
from ..schemas.manifest import Manifest
from ..schemas.size import parse_size
from ..schemas.writer_state import CLOSED, WriterState
from .hooks.session import ENVIRONMENT, Order
from .store import Store, create_trace, write_whole

WEIGHTS_CHOICES = ("auto", "delta", "none")
LAUNCHER = "record"
"""Writer name of `tim-trace record` itself; it records nothing but how the command ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """How a recorded command ended, and what it left."""

    folder: Path
    exit_code: int
    writers: tuple[WriterState, ...]
    """The processes that recorded something, or tried."""

    @property
    def num_sequences(self) -> int:
        return sum(writer.num_sequences for writer in self.writers)

    @property
    def num_tokens(self) -> int:
        return sum(writer.num_tokens for writer in self.writers)


def record(
    command: Sequence[str],
    *,
    output: str | os.PathLike[str],
    capture: str = "logprobs",
    capture_fraction: float = 1.0,
    weights: str = "auto",
    weights_below: str = "500MB",
    weights_from: str | None = None,
    routing: bool = False,
    force: bool = False,
) -> Recording:
    """Run COMMAND and record what TRL's trainers and vLLM do in it.

    `weights` is `delta` (keep every version's weights), `none`, or `auto`: delta for a model of at most
    `weights_below`, a size such as 500MB or 2GB. `weights_from` names the folder of Hugging Face checkpoints that the
    run saves anyway, to read weights from there instead. `routing` keeps what the routers of a mixture of experts chose
    in the `train` pass, for every token of prompts and responses.

    Returns when the command has ended; its exit code is passed on, and a process that died leaves what it had
    recorded. Raises TraceExists, StorageError or InvalidOption before the command is started.
    """
    if not command:
        raise InvalidOption(
            "record: no command given; write it after --, as in: tim-trace record -o RUN -- python train.py"
        )
    spec = Capture.parse(capture, capture_fraction)
    spec.check_records()
    if weights not in WEIGHTS_CHOICES:
        raise InvalidOption(f"weights: got {weights!r}; use {', '.join(WEIGHTS_CHOICES)}")
    limit = parse_size(weights_below)
    manifest = Manifest(
        run_id=str(uuid.uuid4()),
        created_at=now(),
        created_by=__version__,
        source="record",
        command=tuple(command),
        capture=str(spec),
        capture_fraction=capture_fraction,
        weights_from=None if weights_from is None else os.path.abspath(weights_from),
    )
    folder = create_trace(output, manifest, force=force)
    order = Order(
        run=str(folder),
        capture=str(spec),
        capture_fraction=capture_fraction,
        weights="none" if weights_from is not None and weights == "auto" else weights,
        weights_below=limit,
        routing=routing,
    )
    state = WriterState(writer=LAUNCHER, pid=os.getpid(), opened_at=now(), program=tuple(command))
    try:
        exit_code = _run(command, _environment(order))
    except OSError as error:
        shutil.rmtree(folder)
        raise InvalidOption(_not_started(command[0], error)) from error
    state.state, state.closed_at, state.exit_code = CLOSED, now(), exit_code
    _adopt(folder)
    write_whole(folder / WRITERS / f"{LAUNCHER}.json", state.to_json().encode())
    writers = [writer for writer in Store(folder).writers()[0] if writer.writer != LAUNCHER]
    return Recording(folder=folder, exit_code=exit_code, writers=tuple(writers))


def _adopt(folder: Path) -> None:
    from .adopt import adopt  # here, so that the command starts before Arrow is loaded

    adopt(folder)


def _environment(order: Order) -> dict[str, str]:
    """The command's environment: Python finds our sitecustomize first, and in it the order to record."""
    bootstrap = str(Path(__file__).parent / "bootstrap")
    paths = [bootstrap, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), ENVIRONMENT: order.to_environment()}


def _not_started(name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"record: {name}: no such command; check its name and your PATH"
    return f"record: {name}: cannot be executed ({error.strerror}); start it as: python {name}"


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(list(command), env=environment)
    with _passing_on(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Outlive the command: leave Ctrl-C to it, which the terminal sends it too, and hand other signals on."""
    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number)),
        signal.SIGHUP: signal.signal(signal.SIGHUP, lambda number, _: process.send_signal(number)),
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
