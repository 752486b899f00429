"""How many rows a trace has of each step: what tells a step that has grown from one that has not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.layout import METRICS, SCORES, SEQUENCES
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.tables import TABLES
from ...tracer.snapshot import TableFile
from ...tracer.verified_file import FileCursor
from ..trace.source import Pair, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What is recorded of one step. Rows are only ever added, so that an equal extent is an equal content."""

    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Response tokens."""
    num_scores: int = 0
    """Rows of scores, less those of replays that are not asked for."""

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            num_sequences=self.num_sequences + other.num_sequences,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_tokens=self.num_tokens + other.num_tokens,
            num_scores=self.num_scores + other.num_scores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """What is recorded by now."""

    steps: dict[int, Extent] = field(default_factory=dict)
    """Steps that have sequences or scores."""
    passes: frozenset[str] = frozenset()
    num_metrics: int = 0
    """Logged values, hyperparameters included."""
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path of a sealed file of sequences or scores -> its first and last step."""

    def __add__(self, other: Extents) -> Extents:
        steps = dict(self.steps)
        for step, extent in other.steps.items():
            steps[step] = steps[step] + extent if step in steps else extent
        return Extents(steps=steps, passes=self.passes | other.passes, num_metrics=self.num_metrics + other.num_metrics)


class Surveyor:
    """Counts again and again, and opens each sealed file once: it never changes."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._newest: dict[int, int] = {}
        self._seen: set[str] = set()
        self._sealed = Extents()

    def survey(self, source: Source) -> Extents:
        """Count what lies there. Raises DamagedTrace."""
        files = {entry.relative: (table, entry) for table in _COLUMNS for entry in source.snapshot.files[table]}
        if not self._seen <= set(files) or self._newest != source.newest:
            # Somebody removed files, or steps were made again: what was counted of them is void.
            self._newest, self._seen, self._sealed = source.newest, set(), Extents()
        for path in [path for path in files if path not in self._seen]:
            table, entry = files[path]
            rows = _sealed_rows(source, table, entry)
            self._sealed = self._sealed + self._count(table, rows) + Extents(ranges=_range(path, table, rows))
            self._seen.add(path)
        journaled = (
            self._count(table, rows.select(_COLUMNS[table]))
            for table, rows in source.journals.items()
            if table in _COLUMNS
        )
        return sum(journaled, self._sealed)

    def _count(self, table: str, rows: pa.Table) -> Extents:
        if self._newest:
            rows = _of_newest(rows, self._newest)
        if table == METRICS:
            return Extents(num_metrics=rows.num_rows)
        if table == SCORES:
            counted = rows.group_by(["step", "pass"]).aggregate([([], "count_all")]).to_pylist()
            return Extents(
                steps=_summed(
                    (row["step"], Extent(num_scores=row["count_all"])) for row in counted if self._is_asked(row)
                ),
                passes=frozenset(row["pass"] for row in counted),
            )
        counted = (
            rows.group_by(["step"]).aggregate([([], "count_all"), *((name, "sum") for name in _LENGTHS)]).to_pylist()
        )
        return Extents(steps={row["step"]: _of_sequences(row) for row in counted})

    def _is_asked(self, row: dict[str, Any]) -> bool:
        return row["pass"] in self._pair or not row["pass"].startswith(REPLAY_PREFIX)


_LENGTHS = ("num_prompt_tokens", "num_response_tokens")
_COLUMNS = {
    SEQUENCES: ["step", "attempt", *_LENGTHS],
    SCORES: ["step", "attempt", "pass"],
    METRICS: ["step", "attempt"],
}


def _sealed_rows(source: Source, table: str, entry: TableFile) -> pa.Table:
    columns = [name for name in _COLUMNS[table] if name not in entry.lacking]
    try:
        rows = pq.read_table(pa.PythonFile(FileCursor(entry.file), mode="r"), columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise source.unreadable(entry, error) from error
    for name in set(_COLUMNS[table]) & set(entry.lacking):
        rows = rows.append_column(name, pa.nulls(rows.num_rows, TABLES[table].schema.field(name).type))
    return rows


def _of_newest(rows: pa.Table, newest: dict[int, int]) -> pa.Table:
    """The rows of each step's newest attempt at training, and those of none."""
    wanted = pa.array([newest.get(step) for step in rows["step"].to_pylist()], pa.int32())
    return rows.filter(pc.fill_null(pc.equal(rows["attempt"], wanted), True))


def _range(path: str, table: str, rows: pa.Table) -> dict[str, tuple[int, int]]:
    if table == METRICS or not rows.num_rows:
        return {}
    ends = pc.min_max(rows["step"]).as_py()
    return {path: (ends["min"], ends["max"])}


def _summed(parts: Iterable[tuple[int, Extent]]) -> dict[int, Extent]:
    found: dict[int, Extent] = {}
    for step, extent in parts:
        found[step] = found[step] + extent if step in found else extent
    return found


def _of_sequences(row: dict[str, Any]) -> Extent:
    return Extent(
        num_sequences=row["count_all"],
        num_prompt_tokens=row["num_prompt_tokens_sum"] or 0,
        num_tokens=row["num_response_tokens_sum"] or 0,
    )
