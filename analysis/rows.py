from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, datetime
from importlib import import_module
from itertools import zip_longest
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from ..schemas.errors import ColumnsLeftOut, warn
from ..schemas.results import Result, Table
from ..schemas.steps import ALL_STEPS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Found = TypeVar("Found", bound="DataclassInstance")


def cell_len(text: str) -> int:
    from rich.cells import cell_len as measured  # imported here to keep --help fast

    return measured(text)


@dataclass(frozen=True, slots=True)
class Rows(Table):
    _text = "tim_trace.analysis.rows:to_text"

    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]

    def __len__(self) -> int:
        return len(self.rows)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        return self.columns, self.rows

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def without(self, columns: Collection[str]) -> Rows:
        kept = [index for index, name in enumerate(self.columns) if name not in columns]
        return Rows(tuple(self.columns[i] for i in kept), [tuple(row[i] for i in kept) for row in self.rows])

    def joined(self, other: Rows, keys: Sequence[str]) -> Rows:
        shared = [name for name in keys if name in self.columns and name in other.columns]
        added = tuple(name for name in other.columns if name not in shared)
        found = {tuple(row[name] for name in shared): tuple(row[name] for name in added) for row in other.dicts()}
        none = (None,) * len(added)
        rows = [
            (*row, *found.get(tuple(known[name] for name in shared), none))
            for row, known in zip(self.rows, self.dicts(), strict=True)
        ]
        return Rows(self.columns + added, rows)


def table(values: Sequence[DataclassInstance]) -> Rows:
    columns = tuple(field.name for field in fields(values[0])) if values else ()
    return Rows(columns, [tuple(getattr(value, name) for name in columns) for value in values])


_LINE = 120
"""Maximum length (characters) of a JSON object or array on a single line. Longer ones get one line per item."""
JSON_VERSION = 1
"""Version of all `--json` output. It increases if a key is removed or renamed, or changes its meaning."""

Getter = Callable[[Any], object]
"""Function of a dataclass. Any, because a mapping's type cannot say that its value takes an object of its key."""
Entry = Getter | property | None
Form = Mapping[type, Mapping[str, Entry]]
"""Dataclass -> additional JSON keys, each with the property or function that computes the key's value, or with None to
leave a field out. The JSON Schemas are derived from the types of the fields and from these functions' return types."""


def form_of(kind: type[Result]) -> Form:
    """Return the form in which a command prints a result as JSON.

    If the result's `_text` is MODULE:NAME_text, the form is NAME_FORM from MODULE. If MODULE has no NAME_FORM, the form
    adds a key `sentence`, which NAME_sentence from MODULE computes.
    """
    module, _, function = kind._text.partition(":")
    name, renderers = function.removesuffix("_text"), vars(import_module(module))
    form: Form = renderers.get(f"{name.upper()}_FORM", {kind: {"sentence": renderers.get(f"{name}_sentence")}})
    return form


def entries(kind: type, form: Form) -> dict[str, Getter]:
    """Return a dataclass's JSON keys, each with the function that computes its value. In a result, the keys that the
    form adds, such as the verdict, come first."""
    own, added = {field.name: attrgetter(field.name) for field in fields(kind)}, form.get(kind, {})
    chosen: dict[str, Entry] = {**added, **own, **added} if issubclass(kind, Result) else {**own, **added}
    getters = {name: entry.fget if isinstance(entry, property) else entry for name, entry in chosen.items()}
    return {name: getter for name, getter in getters.items() if getter is not None}


def result_json(found: Result, form: Form | None = None) -> dict[str, Any]:
    """Convert a result to JSON values, by default in the form that its command prints."""
    form = form_of(type(found)) if form is None else form
    return {name: jsonable(getter(found), form) for name, getter in entries(type(found), form).items()}


def to_json(value: object) -> str:
    """Serialize a value as JSON, with terminal control characters escaped. NaN and infinities, which JSON lacks, become
    the strings `NaN`, `Infinity` and `-Infinity`. null means "not recorded"."""
    text = _indented(jsonable(value))
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(char if char == "\n" or char.isprintable() else json.dumps(char)[1:-1] for char in text)


_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _indented(value: object, indent: str = "") -> str:
    """Serialize a JSON value. An object or array is put on one line if it fits."""
    line = _encoded(value)
    if not value or not isinstance(value, (dict, list)) or len(indent) + len(line) <= _LINE:
        return line
    inside = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inside}{_encoded(key)}: {_indented(item, inside)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inside + _indented(item, inside) for item in value) + f"\n{indent}]"


def to_csv(rows: Rows) -> Iterator[str]:
    for row in (rows.columns, *rows.rows):
        line = io.StringIO()
        # csv quotes a cell that contains "\r" or "\n" only if the line terminator contains the same character, so the
        # terminator here contains both.
        csv.writer(line, lineterminator="\r\n").writerow([_csv_cell(value) for value in row])
        yield line.getvalue().removesuffix("\r\n")


def to_text(rows: Rows, width: int | None = None, main: Sequence[str] = ()) -> str:
    """Render a table with one line per row and six significant digits. If the table is too wide but has only a
    few rows, each row is rendered as a list.

    If a longer table is wider than `width`, columns are left out, and a ColumnsLeftOut warning lists them. Columns in
    `main` are kept first, in that order, then the others from left to right. Sentences are wrapped.
    """
    if not rows.columns:
        return ""
    longest = [240 if name in SENTENCES else 120 for name in rows.columns]
    cells = [list(map(_cell, row, longest)) for row in rows.rows]
    columns = [
        _Column(name, place, [row[place] for row in cells], [row[place] for row in rows.rows])
        for place, name in enumerate(map(printable, rows.columns))
    ]
    fits = width is None or sum(column.width + 2 for column in columns) - 2 <= width
    if (len(rows) == 1 and (len(columns) > 8 or not fits)) or (not fits and _fits_as_lists(columns, width or 0)):
        return _as_lists(columns, width)
    if width is not None and not fits:
        columns = _fitted(columns, width, main)
    return "\n".join(_lines(columns))


class _Column:
    def __init__(self, name: str, place: int, cells: list[str], values: Sequence[object]):
        self.name, self.place, self.cells = name, place, cells
        is_number = [isinstance(value, (int, float, NoneType)) and not isinstance(value, bool) for value in values]
        self.is_text = not values or not all(is_number)
        self.is_constant = len(values) > 1 and len(set(cells)) == 1
        self.head = [name]
        self._measure()

    def _measure(self) -> None:
        self.width = max(map(cell_len, (*self.head, *"\n".join(self.cells).split("\n"), " ")))

    def fold(self) -> None:
        self.head = _folded(self.name, max(_SHORTEST_TEXT, *map(cell_len, self.cells), 1))
        self._measure()

    def wrap(self, width: int) -> None:
        self.cells = [textwrap.fill(text, width, break_on_hyphens=False) for text in self.cells]
        self._measure()

    def cut(self, width: int) -> None:
        from rich.cells import set_cell_size

        self.cells = [text if cell_len(text) <= width else set_cell_size(text, width - 1) + "~" for text in self.cells]
        self._measure()

    def padded(self, text: str) -> str:
        room = " " * (self.width - cell_len(text))
        return text + room if self.is_text else room + text


_SHORTEST_TEXT = 12
"""Minimum width of truncated values and wrapped names (characters)."""
_MOST_NAMED = 6
_LONG_TEXT = 40
_MOST_LISTS = 4
"""Maximum number of wide rows to render side by side as lists."""


def _folded(name: str, width: int) -> list[str]:
    lines = [""]
    for part in re.findall(r"[^/_]*[/_]?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _fitted(columns: Sequence[_Column], width: int, main: Sequence[str]) -> list[_Column]:
    for column in columns:
        column.fold()
    rank = {name: place for place, name in enumerate(main)}
    last = {column.name for column in columns if column.name in NO_NEWS and column.is_constant}
    ranked = sorted(columns, key=lambda c: (c.name in last, rank.get(c.name, len(rank)), c.place))
    kept, cut, left = list[_Column](), list[str](), width + 2
    for column in ranked:
        if column.width + 2 > left and column.is_text and left - 2 >= _SHORTEST_TEXT:
            if column.name in SENTENCES:
                column.wrap(left - 2)
            else:
                column.cut(left - 2)
                cut.append(column.name)
        if column.width + 2 <= left or not kept:
            kept.append(column)
            left -= column.width + 2
        elif column.name not in rank:
            break
    kept.sort(key=lambda column: column.place)
    left_out = [column.name for column in ranked if column not in kept]
    more = [f"{len(left_out) - _MOST_NAMED} more"] if len(left_out) > _MOST_NAMED else []
    listed = ", ".join([*left_out[:_MOST_NAMED], *more])
    told = [f"{len(left_out)} of {len(columns)} columns left out ({listed})"] if left_out else []
    told += [f"values in {', '.join(cut)} truncated"] if cut else []
    if told:
        warn("; ".join(told), ColumnsLeftOut)
    return kept


def _lines(columns: Sequence[_Column]) -> Iterator[str]:
    high = max(len(column.head) for column in columns)
    heads = [[""] * (high - len(column.head)) + column.head for column in columns]
    for cells in zip(*heads, strict=True):
        yield _line(columns, cells)
    yield "  ".join("-" * column.width for column in columns)
    for cells in zip(*(column.cells for column in columns), strict=True):
        for parts in zip_longest(*(text.split("\n") for text in cells), fillvalue=""):
            yield _line(columns, parts)


def _line(columns: Sequence[_Column], cells: Sequence[str]) -> str:
    return "  ".join(column.padded(text) for column, text in zip(columns, cells, strict=True)).rstrip()


def _list_widths(columns: Sequence[_Column]) -> tuple[int, list[int]]:
    rows = zip(*(column.cells for column in columns), strict=True)
    values = [max((cell_len(text) for text in row if len(text) < _LONG_TEXT), default=1) for row in rows]
    return max(cell_len(column.name) for column in columns), values


def _fits_as_lists(columns: Sequence[_Column], width: int) -> bool:
    names, values = _list_widths(columns)
    long = any(cell_len(text) >= _LONG_TEXT for column in columns for text in column.cells)
    return 1 < len(values) <= _MOST_LISTS and names + sum(values) + 2 * len(values) <= width and not long


def _as_lists(columns: Sequence[_Column], width: int | None) -> str:
    names, values = _list_widths(columns)
    lines = []
    for column in columns:
        head = column.name + " " * (names - cell_len(column.name))
        cells = [" " * (room - cell_len(text)) + text for text, room in zip(column.cells, values, strict=True)]
        line = "  ".join([head, *cells])
        if width is not None and cell_len(line) > width:
            indent = " " * (names + 2)
            line = textwrap.fill(column.cells[0], width, initial_indent=head + "  ", subsequent_indent=indent)
        lines.append(line)
    return "\n".join(lines)


def _cell(value: object, longest: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(str(value))
    return text if len(text) <= longest else text[: longest - 3] + "..."


def printable(text: str) -> str:
    """Return text as one line with control characters escaped, so that model output cannot control the terminal.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(ord(char)) for char in text)


def _spelled(code: int) -> str:
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def printable_lines(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def wrapped(text: str, indent: str, width: int | None) -> str:
    if width is None:
        return indent + text
    whole = re.sub("`tim-trace [^`]*`", lambda found: found[0].replace(" ", "\0"), text)  # commands stay whole
    return textwrap.fill(
        whole, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=whole == text,
    ).replace("\0", " ")  # fmt: skip


def wrapped_lines(text: str, width: int | None) -> str:
    """Wrap every line except commands and queries, which must stay whole to be copied. Continuation lines are indented
    by two more columns."""
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        start, command = line.lstrip(), ""
        if start.startswith("next: ") and not start.startswith("next: tim-trace"):
            line, space, command = line.partition(" tim-trace ")
            command = f"\n{indent}{space.lstrip()}{command}" * bool(space)
        if not start.startswith(("tim-trace ", "SELECT ", "next: tim-trace ")):
            line = textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        lines.append(line + command)
    return "\n".join(lines)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number followed by its noun, in the singular or the plural.

    >>> counted(1, "row"), counted(2000, "class", "classes")
    ('1 row', '2,000 classes')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def of_steps(steps: str) -> str:
    return "" if steps == ALL_STEPS else f" (steps {steps})"


def shown(found: Found) -> Found:
    """Apply `printable` to every string in a result, so that text from a trace cannot pass for the program's output."""
    own = {field.name: getattr(found, field.name) for field in fields(found) if field.init}
    changed = {name: new for name, value in own.items() if (new := _shown(value)) is not value}
    return replace(found, **changed) if changed else found


def _shown(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_shown(key): _shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_shown(item) for item in value)
    return shown(value) if is_dataclass(value) and not isinstance(value, type) else value


def _csv_cell(value: object) -> object:
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(jsonable(value), ensure_ascii=False)
    return repr(value) if isinstance(value, float) else value


def jsonable(value: object, form: Form = MappingProxyType({})) -> object:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Rows):
        return [jsonable(row) for row in value.dicts()]
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, form) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item, form) for item in value]
    if is_dataclass(value):
        return {name: jsonable(getter(value), form) for name, getter in entries(type(value), form).items()}
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    return str(value)


MAIN_COLUMNS: dict[str, tuple[str, ...]] = {
    "stats": (
        "run", "step", "seq_id", "layer", "num_nan", "num_inf", "num_tokens", "k3", "mean_abs_d", "p99_abs_d", "max_abs_d",
        "ess_token", "routing_agreement",
    ),
    "corrections": (
        "run", "correction", "step", "quarter", "share_tokens_cut", "share_sequences_cut", "share_tokens_truncated",
        "ess_token", "bias_token", "variance_token",
    ),
    "gradient": (
        "step", "arm", "module", "cosine", "norm_ratio", "bias", "grad_norm", "logged_norm", "variance",
    ),
    "replay_plan": (
        "arm", "num_steps", "num_sequences", "num_tokens", "seconds", "tokens_per_s", "num_versions", "load_s",
    ),
    "locate_kinds": ("side", "kind", "carried", "carried_low", "carried_high", "ratio", "num_operators"),
    "locate_patches": ("patch", "taker", "removed", "removed_low", "removed_high", "num_operators"),
    "weights": (
        "version", "module", "kind", "verified", "share_changed", "mean_share_changed", "max_share_changed", "num_bytes",
        "stored_bytes",
    ),
    "compare": ("kind", "name", "step", "a", "b", "sd"),
    "gate": ("condition", "verdict", "value", "low", "high", "bound"),
    "objective": ("figure", "value", "meaning"),
    "onsets": ("series", "step", "95%", "how", "before", "after", "may be first", "sd", "kind"),
    "series": ("series", "first tenth", "last tenth", "changes at", "smallest", "largest"),
}  # fmt: skip
"""Table -> columns to keep if the table is too wide, most important first. Other tables keep their first columns."""

NO_NEWS = frozenset({"run", "num_nan", "num_inf", "iteration_a", "iteration_b"})
"""Columns to drop first if every row has the same value."""

SENTENCES = frozenset({"meaning", "result"})
"""Columns to wrap rather than truncate."""
