"""writers/<id>.json: what one process recorded, with what, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .checksums import SealedFile
from .documents import as_record, read_document, to_document

OPEN, CLOSED, FAILED = "open", "closed", "failed"
COMPACTION = "compact"
"""What the names of writers begin with that merged other writers' files."""
LAUNCHER = "record"
"""Writer name of `tim-trace record` itself, with an id behind it where one was there before; it notes how the command ended."""


@dataclass(slots=True, kw_only=True)
class WriterState:
    """One writer of the trace."""

    writer: str
    """Names the writer's files."""
    run_id: str | None = None
    """Of the trace that it records to; None from earlier releases."""
    state: str = OPEN
    """`open` while it may still write, `closed` after its last record, `failed` when it stopped recording early."""
    error: str | None = None
    """Why it failed; None otherwise."""
    host: str = ""
    boot_id: str | None = None
    """Names the start of the machine's kernel; None where the system does not tell."""
    pid_namespace: str | None = None
    """Names the set of processes in which `pid` means something; None where the system does not tell."""
    pid: int = 0
    process_start: int | None = None
    """When the process began, clock ticks since the machine started; with the pid it names one process."""
    rank: int | None = None
    """Rank in the process group; None when there is none."""
    opened_at: str = ""
    """ISO 8601 in UTC."""
    closed_at: str | None = None
    """ISO 8601 in UTC; None while it is open or when it was killed."""
    attempt: int | None = None
    """Which attempt at training it belongs to, from 1: a run that resumes begins another. None outside of training."""
    attempt_key: str | None = None
    """What all writers of one attempt have in common; of `tim-trace record` itself, what those of its recording begin with."""
    files: dict[str, SealedFile] | None = None
    """Path in the trace -> what was written there; None from releases that did not account for their files."""
    replaced: tuple[str, ...] = ()
    """Paths of files of other writers whose rows its own files hold, so that those do not count; they are being removed."""
    journals: tuple[str, ...] = ()
    """Paths of the journals that are not sealed yet."""
    torn_journals: dict[str, int] = field(default_factory=dict)
    """Path of a journal that was sealed after its process died -> bytes at its end that were no whole record."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    """File that was imported, as its folder calls it -> what it held then; `num_rows` are the lines that were read."""
    import_options: dict[str, str] = field(default_factory=dict)
    """Options of the import that a later one into the same trace has to repeat."""
    attached_from: str | None = None
    """Folder whose weights it attached to a trace that was recorded without; None for every other writer."""
    is_removed: bool = False
    """Whether its files are being removed, so that none of them counts."""
    program: tuple[str, ...] = ()
    """The process's own arguments."""
    exit_code: int | None = None
    """Exit code of the recorded command; None for every writer but the one that `tim-trace record` itself is."""
    hooks: dict[str, str] = field(default_factory=dict)
    """Hooked library -> version."""
    not_recorded: tuple[str, ...] = ()
    """What could not be recorded and why, one sentence each."""
    num_sequences: int = 0
    num_tokens: int = 0
    """Response tokens of these sequences."""
    num_eval_sequences: int = 0
    """Sequences that were sampled to evaluate; in none of the numbers above."""
    spent_s: float = 0.0
    """Time that hooks took from the recorded program's own thread, waiting included, seconds."""
    cpu_s: float | None = None
    """CPU time that hooks and writing threads of this process took, seconds; None of earlier releases, and before the end."""
    waited_s: float = 0.0
    """Time that the recording thread waited because the disk was slower than training, seconds."""
    model: dict[str, Any] = field(default_factory=dict)
    """Identity of the trained model: name, class, config, number of parameters, dtypes."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Identity of the tokenizer: name, class, vocabulary size, hash."""
    versions: dict[str, str] = field(default_factory=dict)
    """Every installed library -> version."""

    @property
    def is_launcher(self) -> bool:
        """Whether this is `tim-trace record` itself, which records nothing but how the command ended."""
        return self.writer == LAUNCHER or self.writer.startswith(f"{LAUNCHER}-")

    def to_json(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("files", "sources"):
            values[name] = values[name] and {path: asdict(file) for path, file in values[name].items()}
        return to_document(values)


def command_exit_code(states: Iterable[WriterState]) -> int | None:
    """Exit code of the command of the newest recording: the first that is not 0 of its nodes; None while one of them runs."""
    launched = sorted((state for state in states if state.is_launcher), key=lambda state: state.opened_at)
    codes = [
        state.exit_code
        for state in launched
        if state is launched[-1] or (state.attempt_key is not None and state.attempt_key == launched[-1].attempt_key)
    ]
    return next((code for code in codes if code), None if None in codes or not codes else 0)


def parse_writer_state(content: bytes, where: str, *, needs_checksum: bool = False) -> WriterState:
    """Read writers/<id>.json; fields that this build does not know are passed over. Raises DamagedTrace."""
    what = "a writer's state"
    return as_record(read_document(content, where, what, needs_checksum=needs_checksum), WriterState, where, what)
