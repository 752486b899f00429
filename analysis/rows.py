"""A table of results, and the ways to write it out."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, datetime
from typing import Any

from ..schemas.results import Table


@dataclass(frozen=True, slots=True)
class Rows(Table):
    """A table of results."""

    _text = "tim_trace.analysis.rows:to_text"

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def __len__(self) -> int:
        return len(self.rows)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        return self.columns, self.rows

    def dicts(self) -> list[dict[str, Any]]:
        """Each row as column -> value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def without(self, columns: Collection[str]) -> Rows:
        """The table less some columns."""
        kept = [index for index, name in enumerate(self.columns) if name not in columns]
        return Rows(tuple(self.columns[i] for i in kept), [tuple(row[i] for i in kept) for row in self.rows])

    def joined(self, other: Rows, keys: Sequence[str]) -> Rows:
        """The table with the columns of another one, row by row where their keys agree; NULL where none does."""
        shared = [name for name in keys if name in self.columns and name in other.columns]
        added = tuple(name for name in other.columns if name not in shared)
        found = {tuple(row[name] for name in shared): tuple(row[name] for name in added) for row in other.dicts()}
        none = (None,) * len(added)
        rows = [
            (*row, *found.get(tuple(known[name] for name in shared), none))
            for row, known in zip(self.rows, self.dicts(), strict=True)
        ]
        return Rows(self.columns + added, rows)


def table(values: Sequence[Any]) -> Rows:
    """Dataclass instances of one class as a table, a row each."""
    columns = tuple(field.name for field in fields(values[0])) if values else ()
    return Rows(columns, [tuple(getattr(value, name) for name in columns) for value in values])


def to_json(value: Any) -> str:
    """Write a value as JSON. NaN and infinities, which JSON has no numbers for, become the strings `NaN`, `Infinity`
    and `-Infinity`; null stays "not recorded". Characters that would act on a terminal are escaped."""
    text = json.dumps(_jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(char if char == "\n" or char.isprintable() else json.dumps(char)[1:-1] for char in text)


def to_csv(rows: Rows) -> Iterator[str]:
    """Write a table as CSV, a line at a time: numbers with all their digits, an empty field for NULL."""
    for row in (rows.columns, *rows.rows):
        line = io.StringIO()
        # A cell is quoted where it holds a character that ends lines, so the writer has to know both of them.
        csv.writer(line, lineterminator="\r\n").writerow([_csv_cell(value) for value in row])
        yield line.getvalue().removesuffix("\r\n")


def to_text(rows: Rows, width: int | None = None) -> str:
    """Write a table for reading: numbers with six digits, one row as a list of names and values, wide tables in blocks."""
    if not rows.columns:
        return ""
    rows = Rows(tuple(map(printable, rows.columns)), rows.rows)
    if len(rows) == 1 and len(rows.columns) > 8:
        return _vertical(rows)
    cells = [[_cell(value) for value in row] for row in rows.rows]
    right = [
        all(_is_number(row[i]) or row[i] is None for row in rows.rows) and len(rows) > 0
        for i in range(len(rows.columns))
    ]
    widths = [max(len(name), *(len(row[i]) for row in cells), 1) for i, name in enumerate(rows.columns)]
    blocks = _blocks(widths, width)
    return "\n\n".join(_block(rows.columns, cells, widths, right, block) for block in blocks)


def _vertical(rows: Rows) -> str:
    name_width = max(len(name) for name in rows.columns)
    values = [_cell(value) for value in rows.rows[0]]
    value_width = max(
        len(value) for value, raw in zip(values, rows.rows[0], strict=True) if len(value) < 40 or _is_number(raw)
    )
    lines = [f"{name:<{name_width}}  {value:>{value_width}}" for name, value in zip(rows.columns, values, strict=True)]
    return "\n".join(lines)


def _blocks(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Cut columns into blocks that fit the width; the first two columns lead each."""
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        return [list(range(len(widths)))]
    lead = [0, 1] if len(widths) > 3 and widths[0] + widths[1] < width // 2 else [0]
    blocks: list[list[int]] = []
    used = width + 1
    for column in range(len(lead), len(widths)):
        if used + 2 + widths[column] > width and (not blocks or len(blocks[-1]) > len(lead)):
            blocks.append(list(lead))
            used = sum(widths[i] for i in lead) + 2 * (len(lead) - 1)
        blocks[-1].append(column)
        used += 2 + widths[column]
    return blocks


def _block(
    columns: Sequence[str],
    cells: Iterable[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
    chosen: Sequence[int],
) -> str:
    def line(values: Sequence[str]) -> str:
        parts = [f"{values[i]:>{widths[i]}}" if right[i] else f"{values[i]:<{widths[i]}}" for i in chosen]
        return "  ".join(parts).rstrip()

    return "\n".join([line(columns), "  ".join("-" * widths[i] for i in chosen), *(line(row) for row in cells)])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(str(value))
    return text if len(text) <= 120 else text[:117] + "..."


def printable(text: str) -> str:
    """The text in one line, with its control characters spelled out: those of a model's output must not act on a terminal.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(ord(char)) for char in text)


def _spelled(code: int) -> str:
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def printable_lines(text: str) -> str:
    """The same of a text of several lines, which stay lines."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def shown(value: Any) -> Any:
    """A result with every text in it in one line and printable, so that what a trace says cannot pass for a line of ours.

    Numbers, and what is neither a dataclass nor a collection, stay as they are.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {shown(key): shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(shown(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changed = {name: new for name, item in own.items() if (new := shown(item)) is not item}
        return replace(value, **changed) if changed else value
    return value


def _csv_cell(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(_jsonable(value), ensure_ascii=False)
    return repr(value) if isinstance(value, float) else value


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Rows):
        return [_jsonable(row) for row in value.dicts()]
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    return str(value)
