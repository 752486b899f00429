"""Import saved responses from inference servers, as JSON Lines or a JSON array. They contain only the engine's logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...schemas.errors import ImportFailed
from .fields import Fields
from .format import DumpFolder, Format, first_object, read_rows
from .textfiles import TIMES_AS_JSON, parsed, read_lines, whole_content

_FILE = r"[^/]+\.(?:jsonl|json)"
STEP = 0
"""Step assigned to a response that has none because it was not sampled in training."""

SETTINGS = {"temperature": ("temperature",), "top_p": ("top_p",), "top_k": ("top_k",), "step": ("step",)}


def _holds(folder: DumpFolder, key: str) -> bool:
    """Return True if the first response in a folder has the given key."""
    name = next((name for name, _ in folder.matching(_FILE)), None)
    if name is None:
        return False
    try:
        first = next(objects(folder.path(name)), (0, {}))[1]
    except ImportFailed:
        first = first_object(folder, name)
    return key in response_of(first)[0]


def objects(path: Path, first: int = 1) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number, object) from a file of lines, or from a .json file with one object or array."""
    with path.open("rb") as file:
        begins = file.read(64).lstrip()[:1]
    if path.suffix != ".json" or begins not in (b"[", b"{"):
        yield from read_lines(path, first)
        return
    found = parsed(
        whole_content(path, TIMES_AS_JSON), str(path), "a .json file holds one response or an array of responses"
    )
    for number, item in enumerate(found if isinstance(found, list) else [found], start=1):
        if not isinstance(item, Mapping):
            raise ImportFailed(f"{path}, response {number}: is not an object")
        yield number, item


def response_of(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the response and the request from a saved object, which itself is the request if none was saved."""
    inside, request = record.get("response"), record.get("request")
    response = inside if isinstance(inside, Mapping) else record
    if isinstance(response.get("body"), Mapping):
        response = response["body"]
    return response, request if isinstance(request, Mapping) else record


def response_format(
    key: str, rows_of: Callable[[Fields, Mapping[str, Any]], Iterable[dict[str, Any]]], columns: Mapping[str, tuple[str, ...]],
    rollout: str, **told: Any,
) -> Format:  # fmt: skip
    """Return the format for a server's responses, which are recognised by a key.

    `rows_of` returns the rows in one response; `rollout` is the note on responses without logprobs.
    """

    def rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
        response, request = response_of(fields.record)
        settings = fields.of(request, fields.where).cells(*SETTINGS)
        settings["step"] = STEP if settings["step"] is None else settings["step"]
        for place, cells in enumerate(rows_of(fields.of(response, fields.where), response)):
            yield {**settings, "seq_id": f"{name}.{place}", "group_id": name, **cells}

    return Format(
        files="*.jsonl or *.json",
        columns={**columns, **SETTINGS},
        pattern=_FILE,
        recognises=lambda folder: _holds(folder, key),
        read=lambda reading: read_rows(reading, rows, records=objects, unit="response"),
        lines=True,
        lacks={
            "rollout": rollout,
            "train": "responses have only the engine's logprobs; write them as Parquet together with the trainer's logprobs "
            "of the same tokens, and import that with `tim-trace import parquet`",
        },
        **told,
    )
