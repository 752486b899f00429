"""writers/<id>.json: what one process recorded, with what, and how it ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .errors import DamagedTrace

OPEN, CLOSED, FAILED = "open", "closed", "failed"


@dataclass(slots=True, kw_only=True)
class WriterState:
    """One writer of the trace."""

    writer: str
    """Names the writer's files."""
    state: str = OPEN
    """`open` while it may still write, `closed` after its last record, `failed` when it stopped recording early."""
    error: str | None = None
    """Why it failed; None otherwise."""
    host: str = ""
    pid: int = 0
    rank: int | None = None
    """Rank in the process group; None when there is none."""
    opened_at: str = ""
    """ISO 8601 in UTC."""
    closed_at: str | None = None
    """ISO 8601 in UTC; None while it is open or when it was killed."""
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
    spent_s: float = 0.0
    """Time that hooks took from the recorded program's own thread, waiting included, seconds."""
    waited_s: float = 0.0
    """Time that the recording thread waited because the disk was slower than training, seconds."""
    model: dict[str, Any] = field(default_factory=dict)
    """Identity of the trained model: name, class, config, number of parameters, dtypes."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Identity of the tokenizer: name, class, vocabulary size, hash."""
    versions: dict[str, str] = field(default_factory=dict)
    """Every installed library -> version."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str) + "\n"


def parse_writer_state(text: str, where: str) -> WriterState:
    """Read writers/<id>.json; fields that this build does not know are passed over."""
    known = {f.name for f in fields(WriterState)}
    try:
        found: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in json.loads(text).items()
            if key in known
        }
        return WriterState(**found)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedTrace(f"{where}: not a writer's state ({error}); the rest of the trace can be read") from error
