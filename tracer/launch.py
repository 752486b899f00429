from __future__ import annotations

import os
import shlex
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..schemas.capture import Capture
from ..schemas.documents import CLOSED, LAUNCHER, OPEN, Manifest, WriterState, now
from ..schemas.errors import InvalidOption, StorageStalled, TimTraceError, TraceExists, option
from ..schemas.layout import MANIFEST, WRITERS
from ..schemas.size import parse_size
from ..schemas.version import __version__
from .create import claimed, join_trace, local_folder, new_trace, refuse_live
from .hooks.session import BOOTSTRAP, ENVIRONMENT, Order
from .liveness import this_process
from .patience import MAX_WAIT_S, Patience, say
from .processes import SIGN_S, SIGNED_S, Child, has_several_nodes, is_same, later_node, launchers, running_launchers
from .store import Store
from .whole_file import alone, write_part
from .worker import Worker

WEIGHTS_CHOICES = ("auto", "delta", "none")
ENGINE_WEIGHTS_CHOICES = ("given", "held", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    folder: Path
    """The trace's folder. For URLs, the cache folder that is removed after the upload."""
    exit_code: int
    writers: tuple[WriterState, ...]

    is_there: bool = True
    note: str | None = None
    """Reason why this node recorded nothing, or hosts that are still recording."""
    is_stuck: bool = False
    """True if a thread is still waiting for an unresponsive file system."""

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
    weights_from: str | os.PathLike[str] | None = None,
    routing: bool = False,
    engine_weights: str = "given",
    resume: bool = False,
    force: bool = False,
    max_wait: float = MAX_WAIT_S,
    at_end: Callable[[Recording], None] | None = None,
) -> Recording:
    """Run COMMAND and record its TRL and verl trainers and its vLLM engines.

    `weights` is `delta` (keep every version's weights), `none`, or `auto`: delta for models up to `weights_below`, a
    size such as 500MB or 2GB. If the run saves Hugging Face checkpoints anyway, pass their folder as `weights_from`.
    `routing` records which experts a mixture-of-experts model selects in the `train` pass. `engine_weights` selects
    which vLLM weights get a digest: `given` (tensors sent to vLLM), `held` (also the tensors that vLLM holds, at every
    version), or `none`.

    `resume` adds to an existing trace. Repeated steps are recorded as a new attempt. `force` replaces an existing trace
    once the command has started.

    `output` may be a URL, such as s3://bucket/run. The trace is then written to the user's cache folder and uploaded
    about once a minute.

    If the file system does not respond for `max_wait` seconds, recording stops and the command continues. `at_end` is
    called with the recording once the command has ended, before the final upload.

    To record on several nodes, call this on each node with the same `output`. The trace is finished once the last node
    ends.

    Returns once the command has ended, even if it failed. Raises TraceExists, StorageError or InvalidOption before the
    command starts.
    """
    if not command:
        raise InvalidOption(
            "record: no command given. Write it after --, as in: tim-trace record -o RUN -- python train.py"
        )
    if resume and force:
        raise InvalidOption(
            f"record: {option('resume')} adds to an existing trace and {option('force')} replaces it. Choose one"
        )
    spec = Capture.parse(capture, capture_fraction)
    if weights not in WEIGHTS_CHOICES:
        raise InvalidOption(f"got {weights!r}; use {', '.join(WEIGHTS_CHOICES)}", option="weights")
    if engine_weights not in ENGINE_WEIGHTS_CHOICES:
        raise InvalidOption(f"got {engine_weights!r}; use {', '.join(ENGINE_WEIGHTS_CHOICES)}", option="engine_weights")
    limit = parse_size(weights_below, option="weights_below")
    max_wait = Patience(output, max_wait).max_wait_s
    manifest = Manifest(
        run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source="record", command=tuple(command),
        capture=str(spec), capture_fraction=capture_fraction,
        weights_from=None if weights_from is None else os.path.abspath(weights_from),
    )  # fmt: skip

    is_url, sender, number = "://" in os.fspath(output), None, later_node(command)
    if number is not None:
        if is_url:
            return _run_unrecorded(command, output, _none_found(number, output, max_wait))
        say(f"{number}: waiting up to {max_wait:g} s for another node to start the recording")
    elif is_url:
        if resume or force:
            raise InvalidOption(
                f"{output}: traces on object storage cannot be replaced or extended. Use another URL",
                option="resume" if resume else "force",
            )
        from .upload import Sender  # imported here so that the command starts before Arrow is loaded

        sender = Sender(os.fspath(output), max_wait=max_wait)
        output = sender.folder
    # Only the worker touches the folder, so a file system that hangs does not stop this thread from forwarding
    # signals.
    files, claim = Worker(max_bytes=0, patience=Patience(output, max_wait)), ExitStack()

    def begin() -> tuple[Order, str, bool, set[str]] | None:
        """Start or join a recording.

        Returns the options, the run id, whether this is the first launcher, and the names of earlier writers. Returns
        None if this is a later node and there is no recording to join.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread forwards signals
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
            say(f"joining the recording started on {first.host} at {first.opened_at}")
        folder = local_folder(output)
        store = Store(folder)
        trace, states = store.manifest(), store.writers()[0]
        order = Order(
            run=str(folder), session=manifest.run_id if first is None else str(first.attempt_key),
            capture=trace.capture, capture_fraction=trace.capture_fraction,
            weights="none" if weights_from is not None and weights == "auto" else weights, weights_below=limit,
            routing=routing, engine_weights=engine_weights, max_wait=max_wait,
        )  # fmt: skip
        known = {state.writer for state in states if first is None or state.opened_at < first.opened_at}
        return order, trace.run_id, not any(state.is_launcher for state in states), known

    try:
        begun = files.result(begin)
        if begun is None:
            files.close()
            return _run_unrecorded(command, output, _none_found(str(number), output, max_wait))
        order, run_id, is_alone, known = begun
        paths = [BOOTSTRAP, *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), ENVIRONMENT: order.to_environment()}
        child = _started(command, os.environ | variables)
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

    with nullcontext() if sender is None else sender.sending():
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
            so_far = f"recorded {recording.num_sequences:,} sequences so far, still recording on {hosts}"
            return replace(recording, note=f"{so_far}. The trace is finished once the last node ends")
        if at_end is not None:
            at_end(recording)
        return recording

    try:
        recording = files.result(finish)
        files.close()
    except StorageStalled as error:
        files.abandon()
        remedy = f"tim-trace compact {shlex.quote(str(folder))}" if sender is None else sender.remedy
        note = f"{error}, so the recording is not finished. Run `{remedy}` once the file system responds"
        return Recording(folder=folder, exit_code=exit_code, writers=(), note=note, is_stuck=True)
    if sender is not None and recording.is_there and recording.note is None:
        sender.finish()
    return recording


def _none_found(number: str, output: str | os.PathLike[str], wait_s: float) -> str:
    way = "object storage supports recording from one node only. Use a folder shared by all nodes"
    if "://" not in os.fspath(output):
        way = f"no recording was found there within {wait_s:g} s. Start every node with the same shared folder"
    by_itself = f"; unset {number.partition('=')[0]} if this command runs on a single node" if number[0] != "-" else ""
    return f"{number} is set, so another node must start the recording to {output}, but {way}{by_itself}"


def _run_unrecorded(command: Sequence[str], output: str | os.PathLike[str], why: str) -> Recording:
    say(f"NOT RECORDED on this node; the command starts now: {why}")
    exit_code = _started(command, os.environ).wait(lambda: None, SIGN_S)
    return Recording(folder=Path(output), exit_code=exit_code, writers=(), note=f"NOT RECORDED on this node: {why}")


def _started(command: Sequence[str], environment: Mapping[str, str]) -> Child:
    try:
        return Child.start(command, environment)
    except OSError as error:
        why = f"cannot be executed ({error.strerror}). Start it as: python {command[0]}"
        if isinstance(error, FileNotFoundError):
            why = "no such command. Check its name and your PATH"
        raise InvalidOption(f"record: {command[0]}: {why}") from error


class Launcher:
    def __init__(self, folder: Path, run_id: str, command: Sequence[str], session: str, *, is_alone: bool):
        self.folder = folder
        self.state = WriterState(
            writer=LAUNCHER if is_alone else f"{LAUNCHER}-{uuid.uuid4().hex[:8]}", run_id=run_id, **this_process(),
            attempt_key=session, opened_at=now(), program=tuple(command),
        )  # fmt: skip

    def give_sign(self) -> None:
        with suppress(OSError):
            os.utime(self.folder / WRITERS / f"{self.state.writer}.json")

    def close(self, exit_code: int) -> str:
        """Record the exit code and return the hosts that are still recording."""
        self.state.state, self.state.closed_at, self.state.exit_code = CLOSED, now(), exit_code
        beside: set[str] = set()
        # Hold the lock so that if two launchers end at the same time, the second one sees that the first has ended.
        with suppress(OSError), alone(self.folder):
            self.save()
            same = [state for state in launchers(self.folder) if state.attempt_key == self.state.attempt_key]
            beside = {state.writer for state in same if state.state == OPEN}
        return ", ".join(sorted({state.host for state in running_launchers(self.folder, SIGNED_S, beside)}))

    def save(self) -> None:
        with suppress(OSError):
            write_part(self.folder, f"{WRITERS}/{self.state.writer}.json", self.state.to_json().encode())


def _is_there(folder: Path, run_id: str) -> bool:
    with suppress(TimTraceError):
        return Store(folder).manifest().run_id == run_id
    return False


@contextmanager
def _resumed(output: str | os.PathLike[str], manifest: Manifest) -> Iterator[Path]:
    found = join_trace(output, manifest)
    _check_resumable(found, output, manifest)
    _adopt(found)
    with claimed(output) as folder:
        _check_resumable(folder, output, manifest)
        yield folder


def _check_resumable(folder: Path, output: str | os.PathLike[str], manifest: Manifest) -> None:
    store = Store(folder)
    known = store.manifest()
    if (known.capture, known.capture_fraction) != (manifest.capture, manifest.capture_fraction):
        raise TraceExists(
            f"{output} was recorded with --capture {known.capture} --capture-fraction {known.capture_fraction:g}. "
            f"Resume with the same options"
        )
    refuse_live(store, output, "cannot be extended")


def _adopt(folder: Path) -> None:
    from .seal import adopt  # imported here so that the command starts before Arrow is loaded

    adopt(folder)
