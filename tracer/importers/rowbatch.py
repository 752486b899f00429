"""Rows read from a file to import, not yet checked, and the selection of sequences to import."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from ...schemas.errors import ImportFailed, InvalidOption

ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Rows read from a file, stored column by column."""

    file: str
    columns: dict[str, pa.Array | list[Any]]
    """Column name in the file -> values, one per row."""
    numbers: Sequence[int]
    """Number of each row, counted in the file from 1."""
    unit: str = "row"
    """What `numbers` counts: `row`, or `line` in a file with one row per line."""
    routing: Sequence[np.ndarray | None] = ()
    """Router choices per row: [prompt and response tokens, layers, slots] int16, or None; empty if no row has any."""
    num_bytes: int = 0
    """Size of the rows in the file, bytes."""

    def place(self, row: int) -> str:
        """Return the location of a row in the file, for messages."""
        return f"{self.unit} {self.numbers[row]}"


def shown_name(name: str) -> str:
    """Return a column name for a message, quoted if it has unusual characters."""
    return name if name and name.isprintable() and name == name.strip() else repr(name)


def listed_names(names: Sequence[str]) -> str:
    """Return up to twenty column names as a list for a message."""
    rest = len(names) - 20
    return ", ".join(map(shown_name, names[:20])) + (f" and {rest:,} more" if rest > 0 else "") or "none"


@contextmanager
def explained(name: str, format: str) -> Iterator[None]:
    """Convert an error raised by a reader to an ImportFailed that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImportFailed(f"{name}: not readable as {format} ({reason})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The sequences to import, by step and by a hash of their names."""

    steps: frozenset[int] | None = None
    """Steps to import; None if all steps are imported."""
    sample: float = 1.0
    """Share of sequences to import. The hash selects the same sequences in every import."""

    def keeps(self, steps: Sequence[int], seq_ids: Sequence[str]) -> np.ndarray:
        """Return [B] bool: True for each selected sequence, given the steps and names of B sequences."""
        kept = np.ones(len(seq_ids), bool)
        if self.steps is not None:
            kept &= np.isin(np.array(steps, np.int64), list(self.steps))
        if self.sample < 1.0:
            bound = int(self.sample * 2**64)
            hashes = (xxhash.xxh3_64_intdigest(name.encode(errors="replace")) for name in seq_ids)
            kept &= np.array([found < bound for found in hashes], bool)
        return kept


EVERYTHING = Selection()


def check_sample(share: float) -> float:
    """Return the share if it is in (0, 1]. Raises InvalidOption."""
    if not 0.0 < share <= 1.0:
        raise InvalidOption(
            f"got {share}; give a share of the sequences, above 0 and at most 1, for example 0.1", option="sample"
        )
    return share
