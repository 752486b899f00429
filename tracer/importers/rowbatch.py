"""Some rows of a file to import, before anything is known of what they hold."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.errors import ImportFailed

ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Some rows of a file, column by column."""

    file: str
    columns: dict[str, pa.Array | list[Any]]
    """Name of a column, as the file has it -> its values."""
    numbers: Sequence[int]
    """Number of each row in its file, from 1."""
    unit: str = "row"
    """What `numbers` count: `row`, or `line` in a file of lines."""
    routing: Sequence[np.ndarray | None] = ()
    """[tokens of prompt and response, layers, slots] int16 of each row: experts that the rollout's routers chose; empty where
    no row has some."""
    is_text: bool = False
    """Whether the values are the cells of a CSV file."""
    num_bytes: int = 0
    """Bytes of the file that the rows took."""

    def place(self, row: int) -> str:
        """Where a row of these stands in the file."""
        return f"{self.unit} {self.numbers[row]}"


def shown_name(name: str) -> str:
    """The name of a column as a sentence shows it: as it is, or quoted where it is no plain word."""
    return name if name and name.isprintable() and name == name.strip() else repr(name)


def listed_names(names: Sequence[str]) -> str:
    """Names of columns for a sentence, the first twenty of them."""
    rest = len(names) - 20
    return ", ".join(map(shown_name, names[:20])) + (f" and {rest:,} more" if rest > 0 else "") or "none"


@contextmanager
def explained(name: str, format: str) -> Iterator[None]:
    """Name the file in an error of whatever reads it."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeError, csv.Error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImportFailed(f"{name}: not readable as {format} ({reason})") from error
