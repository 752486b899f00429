from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import NotInstalled

if TYPE_CHECKING:
    import pyarrow as pa


class Result:
    """A command's result. `str` converts it to the command's text output."""

    __slots__ = ()

    _text: ClassVar[str]
    """Function that renders the result as text, in the form module:function."""

    def __str__(self) -> str:
        return rendered(self, self._text)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In IPython, show the text output instead of every field."""
        printer.text(str(self))


def rendered(result: Result, renderer: str) -> str:
    module, _, function = renderer.partition(":")
    return str(getattr(import_module(module), function)(result))


class Table(Result):
    """A result with rows, convertible to pandas, Arrow and Polars."""

    __slots__ = ()

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        raise NotImplementedError

    def arrow(self) -> pa.Table:
        """Return the rows as a pyarrow.Table. Columns with mixed types become text."""
        import pyarrow as pa

        names, rows = self._table()
        columns = zip(*rows, strict=True) if rows else ([] for _ in names)
        return pa.Table.from_arrays([_array(column) for column in columns], list(names))

    def df(self) -> Any:
        """Return the rows as a pandas.DataFrame."""
        _library("pandas", "df")
        return self.arrow().to_pandas()

    def pl(self) -> Any:
        """Return the rows as a polars.DataFrame."""
        return _library("polars", "pl").from_arrow(self.arrow())

    def _repr_html_(self) -> str:
        names, rows = self._table()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows[:_MOST_SHOWN])
        more = f"<p>{len(rows):,} rows; first {_MOST_SHOWN} shown</p>" if len(rows) > _MOST_SHOWN else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


_MOST_SHOWN = 100


def _cell(value: object) -> str:
    return "" if value is None else html.escape(f"{value:.6g}" if isinstance(value, float) else str(value))


def _array(values: Sequence[object]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])


def _library(name: str, method: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise NotInstalled(f"{method}: {name} is not installed; pip install {name}") from error
