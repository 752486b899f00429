"""Row counts per step in a trace; comparing them over time shows which steps have grown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.layout import METRICS, SCORES, SEQUENCES
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.tables import TABLES
from ...tracer.snapshot import TableFile
from ...tracer.verified_file import FileCursor
from ..trace.source import Pair, Source

_SUMMED = ["num_prompt_tokens", "num_response_tokens"]
_COLUMNS = {
    SEQUENCES: ["step", "attempt", *_SUMMED],
    SCORES: ["step", "attempt", "pass"],
    METRICS: ["step", "attempt"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Row counts for one step. Rows are never removed or changed, so equal counts mean equal contents."""

    num_sequences: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_scores: int
    """Number of score rows, excluding replays that are not in the pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Row counts for all recorded steps."""

    steps: dict[int, Extent]
    """Step -> row counts, for steps that have sequences or scores."""
    passes: frozenset[str]
    num_metrics: int
    """Number of logged values, including hyperparameters."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """Row counts for one table file or journal."""

    by_step: pa.Table | None = None
    passes: frozenset[str] = frozenset()
    num_metrics: int = 0


class Surveyor:
    """Counter of a trace's rows, meant to be called repeatedly. Sealed files never change, so each is opened only once."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._newest: dict[int, int] = {}
        self._sealed: dict[str, _Counted] = {}

    def survey(self, source: Source) -> Extents:
        """Count the rows in a trace. Raises DamagedTrace."""
        files = {entry.relative: (table, entry) for table in _COLUMNS for entry in source.snapshot.files[table]}
        if not self._sealed.keys() <= files.keys() or self._newest != source.newest:
            # Files were removed or steps were trained again, so the cached counts are out of date.
            self._newest, self._sealed = source.newest, {}
        for path, (table, entry) in files.items():
            if path not in self._sealed:
                self._sealed[path] = self._count(table, _sealed_rows(source, table, entry))
        journals = {table: source.journals[table] for table in _COLUMNS if table in source.journals}
        counted = [
            *self._sealed.values(),
            *(self._count(table, rows.select(_COLUMNS[table])) for table, rows in journals.items()),
        ]
        return Extents(
            steps=_steps([each.by_step for each in counted if each.by_step is not None]),
            passes=frozenset().union(*(each.passes for each in counted)),
            num_metrics=sum(each.num_metrics for each in counted),
        )

    def _count(self, table: str, rows: pa.Table) -> _Counted:
        if self._newest:
            rows = _of_newest(rows, self._newest)
        if table == METRICS:
            return _Counted(num_metrics=rows.num_rows)
        if table == SEQUENCES:
            return _Counted(_by_step(rows, "num_sequences", _SUMMED))
        names = frozenset(pc.unique(rows["pass"]).to_pylist())
        shown = [name for name in names if name in self._pair or not name.startswith(REPLAY_PREFIX)]
        rows = rows.filter(pc.is_in(rows["pass"], pa.array(shown, rows["pass"].type)))
        return _Counted(_by_step(rows, "num_scores"), names)


def _by_step(rows: pa.Table, name: str, summed: Sequence[str] = ()) -> pa.Table:
    found = rows.group_by("step").aggregate([([], "count_all"), *((column, "sum") for column in summed)])
    return found.rename_columns([name if n == "count_all" else n.removesuffix("_sum") for n in found.column_names])


def _steps(parts: Sequence[pa.Table]) -> dict[int, Extent]:
    names = ["num_sequences", *_SUMMED, "num_scores"]
    empty = pa.table({name: pa.array([], pa.int64()) for name in ("step", *names)})
    whole = pa.concat_tables([empty, *parts], promote_options="permissive")
    rows = whole.group_by("step").aggregate([(name, "sum") for name in names]).to_pylist()
    return {row["step"]: Extent(**{name: row[f"{name}_sum"] or 0 for name in names}) for row in rows}


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
    """Return the rows that belong to their step's newest training attempt, and the rows without an attempt."""
    wanted = pa.array([newest.get(step) for step in rows["step"].to_pylist()], pa.int32())
    return rows.filter(pc.fill_null(pc.equal(rows["attempt"], wanted), True))
