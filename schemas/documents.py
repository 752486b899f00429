"""The JSON documents of a trace: written with a checksum over their content, read with the types of their fields checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from .checksums import whole_hash
from .contract import canonical_json, plain
from .errors import DamagedTrace

CHECKSUM = "checksum"
"""Name of the field: XXH3-128 of the other fields as JSON with sorted keys and without spaces."""
MAX_BYTES = 64 << 20
"""A larger document is refused unread."""
MAX_DEPTH = 64
"""Values inside of each other; what reads them goes down as deep."""
_MAX_INTEGER = 1 << 64

Record = TypeVar("Record")


def to_document(values: Mapping[str, Any]) -> str:
    """JSON with a checksum of its content."""
    content = plain(values)
    text = json.dumps({**content, CHECKSUM: whole_hash(_canonical(content).encode())})
    return msgspec.json.format(text, indent=1) + "\n"  # json's own indentation takes ten times as long


def read_object(content: bytes, where: str, what: str) -> dict[str, Any]:
    """The fields of a document, its checksum among them. Raises DamagedTrace for anything that is no JSON object.

    `where` and `what` (such as `a writer's state`) are named in errors.
    """
    try:
        values = json.loads(content.decode(), parse_int=_integer)  # of bytes, json would read UTF-16 as well
        _check(values, content)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {what} ({_first_line(error)}); restore it from a copy") from error
    return dict(values)


def _check(document: Any, content: bytes) -> None:
    """Raise ValueError for what no document of ours holds, and what would stop those that read it; `content` is its text."""
    if not isinstance(document, dict):
        raise TypeError(f"it is of type {type(document).__name__}")
    if content.count(b"{") + content.count(b"[") <= MAX_DEPTH and b"\\u" not in content:
        return  # to look at every value takes longer than to read it
    waiting: list[tuple[int, Any]] = [(1, document)]
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, str):
            value.encode()  # half a surrogate pair is no text, and cannot be printed
        elif isinstance(value, (dict, list)):
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested deeper than {MAX_DEPTH} values")
            inside = value if isinstance(value, list) else (*value, *value.values())
            waiting += [(depth + 1, item) for item in inside]


def _integer(text: str) -> int:
    value = int(text)
    if abs(value) > _MAX_INTEGER:
        raise ValueError("it holds an integer beyond 64 bits")
    return value


def read_document(content: bytes, where: str, what: str, *, needs_checksum: bool) -> dict[str, Any]:
    """The fields of a document without its checksum, which was compared.

    Raises DamagedTrace for what is not as it was written; a document without a checksum passes where none is needed.
    """
    values = read_object(content, where, what)
    checksum = values.pop(CHECKSUM, None)
    if needs_checksum if checksum is None else checksum != whole_hash(_canonical(values).encode()):
        lacks = "its checksum is missing" if checksum is None else "its content does not fit its checksum"
        raise DamagedTrace(f"{where}: {lacks}, so it is not {what} as it was written; restore it from a copy")
    return values


def _canonical(values: dict[str, Any]) -> str:
    """`canonical_json` of what is plain, or was read of JSON, in which numbers that are not finite have to be written otherwise."""
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return canonical_json(values)


def as_record(values: Mapping[str, Any], kind: type[Record], where: str, what: str) -> Record:
    """A document's fields as a dataclass, unknown ones left out. Raises DamagedTrace for missing ones and wrong types."""
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {what} ({_first_line(error)}); restore it from a copy") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
