"""writers/<id>.json: one process's files, environment and exit state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .checksums import SealedFile
from .documents import as_record, read_document, to_document

OPEN, CLOSED, FAILED = "open", "closed", "failed"
COMPACTION = "compact"
"""Name prefix of writers that merged other writers' files."""
LAUNCHER = "record"
"""Writer name of `tim-trace record` itself, with an id appended if taken; records the command's exit code."""


@dataclass(slots=True, kw_only=True)
class WriterState:
    """One writer of the trace."""

    writer: str
    """Names the writer's files."""
    run_id: str | None = None
    """Run of the trace; None if written by an older release."""
    state: str = OPEN
    """`open` while it may still write, `closed` after its last record, `failed` if it stopped recording early."""
    error: str | None = None
    """Why it failed; None otherwise."""
    host: str = ""
    boot_id: str | None = None
    """Identifies the boot of the machine; None if the system provides none."""
    pid_namespace: str | None = None
    """PID namespace of `pid`; None if the system provides none."""
    pid: int = 0
    process_start: int | None = None
    """Start of the process, clock ticks since boot; identifies a process together with the pid."""
    rank: int | None = None
    """Rank in the process group; None without one."""
    opened_at: str = ""
    """ISO 8601 in UTC."""
    closed_at: str | None = None
    """ISO 8601 in UTC; None while open or if killed."""
    attempt: int | None = None
    """Training attempt, from 1; a resumed run begins another. None outside training."""
    attempt_key: str | None = None
    """Key shared by all writers of one attempt; for `tim-trace record` itself, the common prefix of its recording's keys."""
    files: dict[str, SealedFile] | None = None
    """Path in the trace -> sealed file; None if written by a release without this list."""
    replaced: tuple[str, ...] = ()
    """Other writers' files whose rows were merged into this writer's; readers ignore them until they are removed."""
    journals: tuple[str, ...] = ()
    """Paths of unsealed journals."""
    torn_journals: dict[str, int] = field(default_factory=dict)
    """Journal sealed after its process died -> bytes of an incomplete record at its end."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    """Imported file, relative to its folder -> its state at import; `num_rows` is the number of lines read."""
    import_options: dict[str, str] = field(default_factory=dict)
    """Import options that later imports into the same trace must repeat."""
    attached_from: str | None = None
    """Folder from which weights were attached to the trace; None for other writers."""
    is_removed: bool = False
    """True while its files are being removed; readers ignore them."""
    program: tuple[str, ...] = ()
    """The process's arguments."""
    exit_code: int | None = None
    """Exit code of the recorded command; None except for `tim-trace record` itself."""
    hooks: dict[str, str] = field(default_factory=dict)
    """Hooked library -> version."""
    not_recorded: tuple[str, ...] = ()
    """Data that could not be recorded and why, one sentence each."""
    num_sequences: int = 0
    num_tokens: int = 0
    """Response tokens of these sequences."""
    num_eval_sequences: int = 0
    """Evaluation sequences, not included in the counts above."""
    spent_s: float = 0.0
    """Time that hooks spent in the recorded program's thread, including waits, seconds."""
    cpu_s: float | None = None
    """CPU time of this process's hooks and writer threads, seconds; None before the end or if written by an older release."""
    waited_s: float = 0.0
    """Time that the recording thread waited for the disk, seconds."""
    model: dict[str, Any] = field(default_factory=dict)
    """The trained model: name, class, config, number of parameters, dtypes."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """The tokenizer: name, class, vocabulary size, hash."""
    versions: dict[str, str] = field(default_factory=dict)
    """Every installed library -> version."""

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
    """Return the newest recording's exit code: the first non-zero one of its nodes, else None while any runs, else 0."""
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
