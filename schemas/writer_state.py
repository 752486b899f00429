"""Read and write writers/<id>.json, which holds one process's files, environment and exit state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .checksums import SealedFile
from .documents import as_record, read_document, to_document

OPEN, CLOSED, FAILED = "open", "closed", "failed"
COMPACTION = "compact"
"""Prefix of writer names for writers that merge other writers' files."""
LAUNCHER = "record"
"""Writer name of `tim-trace record` itself, which records the exit code; an id is appended if it is taken."""


@dataclass(slots=True, kw_only=True)
class WriterState:
    """State of one writer in the trace."""

    writer: str
    """Name of the writer and prefix of all its file names."""
    run_id: str | None = None
    """UUID of the recorded run; None if an older release wrote the state."""
    state: str = OPEN
    """State of the writer: `open` while it may still write, `closed` after its last record, `failed` if it stopped early."""
    error: str | None = None
    """Reason why the writer failed; None if it did not fail."""
    host: str = ""
    boot_id: str | None = None
    """Identifier of the machine's current boot; None if the system does not provide one."""
    pid_namespace: str | None = None
    """PID namespace to which `pid` belongs; None if the system does not provide one."""
    pid: int = 0
    process_start: int | None = None
    """Start time of the process, in clock ticks since boot. Together with the pid, it identifies a process."""
    rank: int | None = None
    """Rank of the process in its process group; None if there is no process group."""
    opened_at: str = ""
    """Time when the writer was opened, ISO 8601 in UTC."""
    closed_at: str | None = None
    """Time when the writer was closed, ISO 8601 in UTC; None while it is open or if its process was killed."""
    attempt: int | None = None
    """Number of the training attempt, from 1; resuming a run begins a new attempt. None outside training."""
    attempt_key: str | None = None
    """Key shared by all writers of one attempt; for `tim-trace record`, the prefix of the keys of all attempts."""
    files: dict[str, SealedFile] | None = None
    """Path in the trace -> record of the sealed file; None if an older release without this list wrote the state."""
    replaced: tuple[str, ...] = ()
    """Other writers' files whose rows were merged into this writer's; readers ignore them until they are removed."""
    journals: tuple[str, ...] = ()
    """Paths of journals that are not sealed."""
    torn_journals: dict[str, int] = field(default_factory=dict)
    """Journal that was sealed after its process died -> size of the incomplete record at the journal's end, bytes."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    """Path in the imported folder -> size and checksums at import. `num_rows` is the number of lines read."""
    import_options: dict[str, str] = field(default_factory=dict)
    """Import options that later imports into the same trace must repeat."""
    attached_from: str | None = None
    """Folder from which this writer attached weights to the trace; None for other writers."""
    is_removed: bool = False
    """True while the writer's files are being removed; readers ignore the files."""
    program: tuple[str, ...] = ()
    """Command line of the process."""
    exit_code: int | None = None
    """Exit code of the recorded command; None except for `tim-trace record` itself."""
    hooks: dict[str, str] = field(default_factory=dict)
    """Name of a hooked library -> version of the library."""
    not_recorded: tuple[str, ...] = ()
    """Data that could not be recorded and why, one sentence each."""
    num_sequences: int = 0
    num_tokens: int = 0
    """Number of response tokens in the recorded sequences."""
    num_eval_sequences: int = 0
    """Number of evaluation sequences, which num_sequences and num_tokens do not include."""
    spent_s: float = 0.0
    """Time that hooks spent in the recorded program's thread, including waiting time, seconds."""
    cpu_s: float | None = None
    """CPU time of this process's hooks and writer threads, seconds; None until the process ends."""
    waited_s: float = 0.0
    """Time that the recording thread waited for the disk, seconds."""
    model: dict[str, Any] = field(default_factory=dict)
    """The trained model: name, class, config, number of parameters, dtypes."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """The tokenizer: name, class, vocabulary size, hash."""
    versions: dict[str, str] = field(default_factory=dict)
    """Name of an installed library -> version; all installed libraries are listed."""

    @property
    def is_launcher(self) -> bool:
        """True for `tim-trace record` itself, which records only the command's exit code."""
        return self.writer == LAUNCHER or self.writer.startswith(f"{LAUNCHER}-")

    def to_json(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("files", "sources"):
            values[name] = values[name] and {path: asdict(file) for path, file in values[name].items()}
        return to_document(values)


def command_exit_code(states: Iterable[WriterState]) -> int | None:
    """Return the first non-zero exit code among the nodes of the newest recording; else None while one runs, or 0."""
    launched = sorted((state for state in states if state.is_launcher), key=lambda state: state.opened_at)
    codes = [
        state.exit_code
        for state in launched
        if state is launched[-1] or (state.attempt_key is not None and state.attempt_key == launched[-1].attempt_key)
    ]
    return next((code for code in codes if code), None if None in codes or not codes else 0)


def parse_writer_state(content: bytes, where: str, *, needs_checksum: bool = False) -> WriterState:
    """Parse writers/<id>.json, ignoring unknown fields. Raises DamagedTrace."""
    what = "a writer's state"
    return as_record(read_document(content, where, what, needs_checksum=needs_checksum), WriterState, where, what)
