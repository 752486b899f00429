"""Write a trace's JSON documents with a checksum, and read them with type checks on every field; trace.json is one of
them, with the format version and the run's identity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from .checksums import whole_hash
from .contract import canonical_json, plain
from .errors import DamagedTrace, NewerTrace

CHECKSUM = "checksum"
"""Name of the checksum field, which holds the XXH3-128 of the other fields as JSON with sorted keys and no spaces."""
MAX_BYTES = 64 << 20
"""Maximum size of a document, bytes."""
MAX_DEPTH = 64
"""Maximum nesting depth of values in a document, which keeps recursive readers within the stack limit."""
_MAX_INTEGER = 1 << 64

Record = TypeVar("Record")


def now() -> str:
    """Return the current time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def to_document(values: Mapping[str, Any]) -> str:
    """Return `values` as a JSON document that includes a checksum."""
    content = plain(values)
    text = json.dumps({**content, CHECKSUM: whole_hash(_canonical(content).encode())})
    return msgspec.json.format(text, indent=1) + "\n"  # 10 times faster than json's own indentation


def read_object(content: bytes, where: str, what: str) -> dict[str, Any]:
    """Return a document's fields with its checksum. Raises DamagedTrace, naming the file (`where`) and its kind."""
    try:
        values = json.loads(content.decode(), parse_int=_integer)  # json would also accept UTF-16 bytes
        _check(values, content)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {what} ({_first_line(error)}); restore it from a copy") from error
    return dict(values)


def _check(document: Any, content: bytes) -> None:
    """Raise ValueError or TypeError for content that readers cannot process; `content` is the document's text."""
    if not isinstance(document, dict):
        raise TypeError(f"it is of type {type(document).__name__}")
    if content.count(b"{") + content.count(b"[") <= MAX_DEPTH and b"\\u" not in content:
        return  # visiting every value would take longer than parsing
    waiting: list[tuple[int, Any]] = [(1, document)]
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, str):
            value.encode()  # raises for a lone surrogate, which cannot be printed
        elif isinstance(value, (dict, list)):
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested deeper than {MAX_DEPTH} values")
            inside = value if isinstance(value, list) else (*value, *value.values())
            waiting += [(depth + 1, item) for item in inside]


def _integer(text: str) -> int:
    value = int(text)
    if abs(value) > _MAX_INTEGER:
        raise ValueError("it contains an integer beyond 64 bits")
    return value


def read_document(content: bytes, where: str, what: str, *, needs_checksum: bool) -> dict[str, Any]:
    """Return the fields of a document after verifying its checksum. The checksum field is not returned.

    Raises DamagedTrace if the content does not match its checksum. A missing checksum is accepted unless `needs_checksum`.
    """
    values = read_object(content, where, what)
    checksum = values.pop(CHECKSUM, None)
    if needs_checksum if checksum is None else checksum != whole_hash(_canonical(values).encode()):
        lacks = "its checksum is missing" if checksum is None else "its content does not match its checksum"
        raise DamagedTrace(f"{where}: {lacks}, so {what} was changed or damaged after writing; restore it from a copy")
    return values


def _canonical(values: dict[str, Any]) -> str:
    """Return `canonical_json(values)`, with a fast path for values without non-finite numbers."""
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return canonical_json(values)


def as_record(values: Mapping[str, Any], kind: type[Record], where: str, what: str) -> Record:
    """Convert fields to a dataclass, ignoring unknown ones. Raises DamagedTrace for missing fields and wrong types."""
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {what} ({_first_line(error)}); restore it from a copy") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


FORMAT = "tim-trace"
FORMAT_VERSION = 2
"""Version 1 has no checksums. Since version 2, writers list their files and checksums, and rows have an `attempt`."""
CHECKED_SINCE = 2

_WHAT = "the trace.json of a trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The file that makes a folder a trace; written once and never changed."""

    run_id: str
    """UUID of the run; unchanged when the trace folder is moved."""
    created_at: str
    """Time when recording began, ISO 8601 in UTC."""
    created_by: str
    """Version of tim-trace that created the trace."""
    source: str
    """How the trace was created: `record`, `recorder` (the Python API), or `import <format>`."""
    command: tuple[str, ...] = ()
    """The recorded command and its arguments; empty if no command was recorded."""
    capture: str = "logprobs"
    """Recording level for token distributions: `logprobs`, `topk:K` or `logits`."""
    capture_fraction: float = 1.0
    """Share of sequences, from 0 to 1, whose token distributions are kept."""
    weights_from: str | None = None
    """Folder with the run's Hugging Face checkpoints if weights are read from checkpoints; else None."""
    format_version: int = FORMAT_VERSION

    @property
    def is_import(self) -> bool:
        """True if the trace was imported from another tool's files."""
        return self.source.startswith("import ")

    @property
    def is_checked(self) -> bool:
        """True if every file of the trace has checksums."""
        return self.format_version >= CHECKED_SINCE

    def to_json(self) -> str:
        return to_document({"format": FORMAT, **asdict(self)})


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse trace.json. `where` names the file in error messages. Raises DamagedTrace and NewerTrace."""
    found = read_object(content, where, _WHAT)
    version = found.get("format_version")
    if found.get("format") != FORMAT or type(version) is not int or version < 1:
        raise DamagedTrace(
            f"{where}: not {_WHAT}; pass the folder written by `tim-trace record -o` or `tim-trace import`"
        )
    if version > FORMAT_VERSION:
        raise NewerTrace(
            f"{where}: trace format {version} is newer than this tim-trace, which reads up to {FORMAT_VERSION}; "
            "upgrade it with: pip install --upgrade tim-trace"
        )
    values = read_document(content, where, _WHAT, needs_checksum=version >= CHECKED_SINCE)
    return as_record(values, Manifest, where, _WHAT)
