"""Saved responses of inference servers, one JSON object a line or an array of them: the engine's side alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...schemas.errors import ImportFailed
from .dump import DumpFolder, Part, Reading
from .dump_rows import DumpRows
from .fields import Fields
from .line_files import first_object, read_lines
from .remote_file import TIMES_AS_JSON, DumpFile, whole_content
from .rowbatch import ROWS_AT_ONCE, RowBatch
from .textfiles import parsed

_FILE = r"[^/]+\.(?:jsonl|json)"
STEP = 0
"""The step of a response that says none: it was not sampled in training."""

SETTINGS = {"temperature": ("temperature",), "top_p": ("top_p",), "top_k": ("top_k",), "step": ("step",)}


def response_parts(folder: DumpFolder) -> list[Part]:
    """Each file of responses."""
    return [Part(files=(name,)) for name, _ in folder.matching(_FILE)]


def holds(folder: DumpFolder, key: str) -> bool:
    """Whether the first response of a folder has a key."""
    name = next((name for name, _ in folder.matching(_FILE)), None)
    if name is None:
        return False
    try:
        first = next(objects(folder.path(name)), (0, {}))[1]
    except ImportFailed:
        first = first_object(folder, name)
    return key in response_of(first)[0]


def objects(path: DumpFile, first: int = 1) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file and their numbers: of its lines, or of the one array or object that the whole of it is."""
    with path.open("rb") as file:
        begins = file.read(64).lstrip()[:1]
    if path.suffix != ".json" or begins not in (b"[", b"{"):
        yield from read_lines(path, first)
        return
    found = parsed(whole_content(path, TIMES_AS_JSON), str(path), "a .json file is one response, or an array of them")
    for number, item in enumerate(found if isinstance(found, list) else [found], start=1):
        if not isinstance(item, Mapping):
            raise ImportFailed(f"{path}, response {number}: is no object")
        yield number, item


def response_of(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The response of a saved object, and the request where it was saved with it."""
    inside, request = record.get("response"), record.get("request")
    response = inside if isinstance(inside, Mapping) else record
    if isinstance(response.get("body"), Mapping):
        response = response["body"]
    return response, request if isinstance(request, Mapping) else record


def read_responses(
    reading: Reading, rows_of: Callable[[Fields, Mapping[str, Any]], Iterator[dict[str, Any]]]
) -> Iterator[RowBatch]:
    """Rows of the saved objects: `rows_of` gives those of one response."""
    ((name, path),) = zip(reading.part.files, reading.paths(), strict=True)
    rows, budget = DumpRows(str(path), "response"), reading.budget()
    for number, record in objects(path, reading.first_line.get(name, 1)):
        if path.suffix != ".json":
            reading.last_line[name] = number
        response, request = response_of(record)
        where = f"{path}, response {number}"
        settings = reading.fields(request, where, budget)
        common = {
            "step": STEP if (step := settings.integer("step")) is None else step,
            **{key: settings.number(key) for key in ("temperature", "top_p")},
            "top_k": settings.integer("top_k"),
        }
        for place, cells in enumerate(rows_of(reading.fields(response, where, budget), response)):
            rows.add(
                number, **{**common, "seq_id": f"{name}:{number}.{place}", "group_id": f"{name}:{number}", **cells}
            )
        if len(rows) >= ROWS_AT_ONCE:
            yield rows.batch()
            rows = DumpRows(str(path), "response")
    if len(rows):
        yield rows.batch()
