"""`tim-trace record`: run a command so that every Python process in it records itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .. import __version__
from ..schemas.capture import Capture
from ..schemas.clock import now
from ..schemas.errors import InvalidOption, StorageStalled, TimTraceError, TraceExists, option
from ..schemas.layout import MANIFEST, WRITERS
from ..schemas.manifest import Manifest
from ..schemas.size import parse_size
from ..schemas.writer_state import CLOSED, LAUNCHER, OPEN, WriterState
from .child import Child
from .create import claimed, join_trace, local_folder, new_trace, refuse_live
from .hooks.session import BOOTSTRAP, ENVIRONMENT, Order
from .liveness import this_process
from .lock import alone
from .nodes import SIGN_S, SIGNED_S, has_several_nodes, is_same, later_node, launchers, running_launchers
from .patience import MAX_WAIT_S, Patience
from .progress import no_progress
from .sender import Sender
from .store import Store
from .whole_file import write_part
from .worker import Worker

WEIGHTS_CHOICES = ("auto", "delta", "none")
ENGINE_WEIGHTS_CHOICES = ("given", "held", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """How a recorded command ended, and what it left."""

    folder: Path
    """Folder of the trace; for a recording to a URL, the removed folder that it was sent from."""
    exit_code: int
    writers: tuple[WriterState, ...]
    """The processes that recorded something, or tried."""

    is_there: bool = True
    """Whether the folder exists; false if it was removed while the command ran."""
    note: str | None = None
    """Why this node recorded nothing, or where the recording goes on; None where it is finished here."""
    is_stuck: bool = False
    """Whether a thread still waits for a file system that did not answer."""

    @property
    def num_sequences(self) -> int:
        return sum(writer.num_sequences for writer in self.writers)

    @property
    def num_eval_sequences(self) -> int:
        return sum(writer.num_eval_sequences for writer in self.writers)

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
    engine_weights: str = "given",
    resume: bool = False,
    force: bool = False,
    compact: bool = False,
    max_wait: float = MAX_WAIT_S,
    at_end: Callable[[Recording], None] | None = None,
) -> Recording:
    """Run COMMAND and record what the trainers of TRL and verl, and vLLM, do in it.

    `weights` is `delta` (keep every version's weights), `none`, or `auto`: delta for a model of at most
    `weights_below`, a size such as 500MB or 2GB. `weights_from` names the folder of Hugging Face checkpoints that the
    run saves anyway, to read weights from there instead. `routing` keeps what the routers of a mixture of experts chose
    in the `train` pass, for every token of prompts and responses. `engine_weights` says which digests of vLLM's weights are
    kept beside the trainer's: of what it is `given` (what it holds is read once, and wherever the two differ), of what it
    has `held` at every version, or `none`.

    `resume` adds to the trace that lies at `output`, where there is one: its steps that are made again stay apart, as another
    attempt. `force` replaces a trace, once the command has started.

    Where `output` is a URL, such as s3://bucket/run, the trace is written to a folder of the user's cache first, and what is
    sealed is sent from there, about once a minute and at the end. That folder is removed when everything has arrived.
    `compact` merges the files of all writers at the end, as the verb of that name does. A process to which the file system
    does not answer for `max_wait` seconds stops recording and goes on. Beginning and ending the recording wait equally long: a
    command whose recording cannot begin starts unrecorded, and a note says how to finish a recording that could not end.
    `at_end` is called with the recording when the command has ended, before the last of it is sent.

    On several nodes each runs this with the same `output`: further ones (`nodes.later_node`) join the recording that another
    began, wait `max_wait` seconds for it, and run their command unrecorded where there is none. The last one to end finishes the trace.

    Returns when the command has ended; its exit code is passed on, and a process that died leaves what it had
    recorded. Raises TraceExists, StorageError or InvalidOption before the command is started, and leaves what was there.
    """
    if not command:
        raise InvalidOption(
            "record: no command given; write it after --, as in: tim-trace record -o RUN -- python train.py"
        )
    if resume and force:
        raise InvalidOption(
            f"record: {option('resume')} adds to the trace that lies there and {option('force')} replaces it; choose one"
        )
    spec = Capture.parse(capture, capture_fraction)
    spec.check_records()
    if weights not in WEIGHTS_CHOICES:
        raise InvalidOption(f"got {weights!r}; use {', '.join(WEIGHTS_CHOICES)}", option="weights")
    if engine_weights not in ENGINE_WEIGHTS_CHOICES:
        raise InvalidOption(f"got {engine_weights!r}; use {', '.join(ENGINE_WEIGHTS_CHOICES)}", option="engine_weights")
    limit = parse_size(weights_below, option="weights_below")
    max_wait = Patience(output, max_wait).max_wait_s
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

    is_url, sender, number = "://" in os.fspath(output), None, later_node(command)
    if number is not None:
        if is_url:
            return _run_unrecorded(command, output, _none_found(number, output, max_wait))
        _tell(f"{number}: waiting up to {max_wait:g} s for the recording that another node begins")
    elif is_url:
        if resume or force:
            raise InvalidOption(
                f"{output}: nothing on object storage is replaced or added to; name another URL",
                option="resume" if resume else "force",
            )
        sender = Sender(os.fspath(output), max_wait=max_wait)
        output = sender.folder
    # Only the worker touches the folder, so that this thread can serve the command whatever the file system does.
    files, claim = Worker(max_bytes=0, patience=Patience(output, max_wait)), contextlib.ExitStack()

    def begin() -> tuple[Order, str, bool, set[str]] | None:
        """Begin or join a recording. Return its order, its run id, whether this is its first launcher, and the writers of earlier
        recordings; None if there is none to join.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the other thread sends them on
        first = None
        if number is not None:
            first = next(iter(running_launchers(output, max_wait)), None)
            if first is None:
                return None
        else:
            adds = resume and (Path(output) / MANIFEST).exists()
            try:
                claim.enter_context(_resumed(output, manifest) if adds else new_trace(output, manifest, force=force))
            except TraceExists:
                if has_several_nodes(command) and not is_url:
                    running = running_launchers(output, SIGNED_S)
                    first = next((state for state in running if is_same(state.program, command)), None)
                if first is None:
                    raise
        if first is not None:
            _tell(f"joining the recording that began on {first.host} at {first.opened_at}")
        folder = local_folder(output)
        store = Store(folder)
        trace, states = store.manifest(), store.writers()[0]
        order = Order(
            run=str(folder),
            session=manifest.run_id if first is None else str(first.attempt_key),
            capture=trace.capture,
            capture_fraction=trace.capture_fraction,
            weights="none" if weights_from is not None and weights == "auto" else weights,
            weights_below=limit,
            routing=routing,
            engine_weights=engine_weights,
            max_wait=max_wait,
        )
        known = {state.writer for state in states if first is None or state.opened_at < first.opened_at}
        return order, trace.run_id, not any(state.is_launcher for state in states), known

    try:
        begun = files.result(begin)
        if begun is None:
            files.close()
            return _run_unrecorded(command, output, _none_found(str(number), output, max_wait))
        order, run_id, is_alone, known = begun
        child = _started(command, _environment(order))
    except StorageStalled as error:
        stalled = error
        files.abandon(lambda: claim.__exit__(type(stalled), stalled, None))
        return replace(_run_unrecorded(command, output, str(error)), is_stuck=True)
    except BaseException as error:
        files.abandon()
        claim.__exit__(type(error), error, error.__traceback__)
        raise
    folder = Path(order.run)
    launcher = Launcher(folder, run_id, command, order.session, is_alone=is_alone)
    files.submit(launcher.save, 0)
    files.submit(claim.close, 0)

    def give_sign() -> None:
        if not files.is_busy:
            files.submit(launcher.give_sign, 0)

    with contextlib.nullcontext() if sender is None else sender.sending():
        exit_code = child.wait(give_sign, SIGN_S)

    def finish() -> Recording:
        if not _is_there(folder, run_id):
            return Recording(folder=folder, exit_code=exit_code, writers=(), is_there=False)
        hosts = launcher.close(exit_code)
        _adopt(folder)
        found = Store(folder).writers()[0]
        writers = tuple(writer for writer in found if writer.writer not in known and not writer.is_launcher)
        recording = Recording(folder=folder, exit_code=exit_code, writers=writers)
        if hosts:
            so_far = f"recorded {recording.num_sequences:,} sequences so far"
            return replace(
                recording, note=f"{so_far}; {hosts} still records, and the last node to end finishes the trace"
            )
        if compact:
            _merge(folder)
        if at_end is not None:
            at_end(recording)
        return recording

    try:
        recording = files.result(finish)
        files.close()
    except StorageStalled as error:
        files.abandon()
        remedy = f"tim-trace compact {shlex.quote(str(folder))}" if sender is None else sender.remedy
        note = f"{error}, so the recording is not finished: `{remedy}` does that once it answers"
        return Recording(folder=folder, exit_code=exit_code, writers=(), note=note, is_stuck=True)
    if sender is not None and recording.is_there and recording.note is None:
        sender.finish()
    return recording


def _none_found(number: str, output: str | os.PathLike[str], wait_s: float) -> str:
    """Say why a further node found no recording to join."""
    way = "object storage takes the recording of one node: name a folder that every node sees"
    if "://" not in os.fspath(output):
        way = f"none was found there in {wait_s:g} s: start every node with the same folder, one that all of them see"
    by_itself = f"; unset {number.partition('=')[0]} where this command records by itself" if number[0] != "-" else ""
    return f"{number} says that another node begins the recording to {output}, and {way}{by_itself}"


def _run_unrecorded(command: Sequence[str], output: str | os.PathLike[str], why: str) -> Recording:
    """Run the command without recording it, and say why before and after."""
    _tell(f"NOT RECORDED on this node, where the command starts now: {why}")
    exit_code = _started(command, os.environ).wait(lambda: None, SIGN_S)
    return Recording(folder=Path(output), exit_code=exit_code, writers=(), note=f"NOT RECORDED on this node: {why}")


def _started(command: Sequence[str], environment: Mapping[str, str]) -> Child:
    try:
        return Child.start(command, environment)
    except OSError as error:
        raise InvalidOption(_not_started(command[0], error)) from error


def _tell(sentence: str) -> None:
    print(f"tim-trace: {sentence}", file=sys.stderr, flush=True)


class Launcher:
    """`tim-trace record` itself as a writer of the trace: shows that the command runs, and how it ended."""

    def __init__(self, folder: Path, run_id: str, command: Sequence[str], session: str, *, is_alone: bool):
        self.folder, self.run_id = folder, run_id
        self.state = WriterState(
            writer=LAUNCHER if is_alone else f"{LAUNCHER}-{uuid.uuid4().hex[:8]}",
            run_id=run_id,
            **this_process(),
            attempt_key=session,
            opened_at=now(),
            program=tuple(command),
            files={},
        )

    def give_sign(self) -> None:
        """Show that the command runs."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def close(self, exit_code: int) -> str:
        """Note how the command ended, and return the hosts that still record: the last one finishes the trace."""
        self.state.state, self.state.closed_at, self.state.exit_code = CLOSED, now(), exit_code
        beside: set[str] = set()
        # Under the lock, the second of two that end at once sees that the first has ended.
        with contextlib.suppress(OSError), alone(self.folder):
            self.save()
            same = [state for state in launchers(self.folder) if state.attempt_key == self.state.attempt_key]
            beside = {state.writer for state in same if state.state == OPEN}
        return ", ".join(sorted({state.host for state in running_launchers(self.folder, SIGNED_S, beside)}))

    @property
    def _path(self) -> Path:
        return self.folder / WRITERS / f"{self.state.writer}.json"

    def save(self) -> None:
        """Write the state. A full disk or a removed folder does not end the command."""
        with contextlib.suppress(OSError):
            write_part(self.folder, f"{WRITERS}/{self.state.writer}.json", self.state.to_json().encode())


def _is_there(folder: Path, run_id: str) -> bool:
    """Whether the folder still holds the trace that was begun, and not another one since, or none."""
    with contextlib.suppress(TimTraceError):
        return Store(folder).manifest().run_id == run_id
    return False


@contextmanager
def _resumed(output: str | os.PathLike[str], manifest: Manifest) -> Iterator[Path]:
    """Claim the folder of a trace that a resumed run adds to. Raises TraceExists."""
    found = join_trace(output, manifest)
    _check_resumable(found, output, manifest)
    _adopt(found)
    with claimed(output) as folder:
        _check_resumable(folder, output, manifest)
        yield folder


def _check_resumable(folder: Path, output: str | os.PathLike[str], manifest: Manifest) -> None:
    """Raise TraceExists unless a run may add to a trace."""
    store = Store(folder)
    known = store.manifest()
    if not known.is_checked:
        raise TraceExists(
            f"{output}: was recorded by an earlier release, and cannot be added to; record to another folder"
        )
    if (known.capture, known.capture_fraction) != (manifest.capture, manifest.capture_fraction):
        raise TraceExists(
            f"{output}: was recorded with --capture {known.capture} --capture-fraction {known.capture_fraction:g}; resume "
            "with the same"
        )
    refuse_live(store, output, "is not added to")


def _adopt(folder: Path) -> None:
    from .adopt import adopt  # here, so that the command starts before Arrow is loaded

    adopt(folder)


def _merge(folder: Path) -> None:
    """Merge the trace's files. A trace that cannot be merged is reported and stays as it is."""
    from .compaction.merge import FILE_BYTES, merge

    try:
        merge(str(folder), FILE_BYTES, no_progress)
    except TimTraceError as error:
        _tell(f"{error}; its files stay as they were recorded")


def _environment(order: Order) -> dict[str, str]:
    """Return the command's environment, in which Python finds the bootstrap's sitecustomize first, and the order to record."""
    paths = [BOOTSTRAP, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), ENVIRONMENT: order.to_environment()}


def _not_started(name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"record: {name}: no such command; check its name and your PATH"
    return f"record: {name}: cannot be executed ({error.strerror}); start it as: python {name}"
