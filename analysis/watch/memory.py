"""Cache a run's series by step. Only steps with new rows are read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.layout import METRICS, SCORES, SEQUENCES
from ...schemas.loss import Loss, read_loss
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.tables import TABLES
from ...tracer.snapshot import TableFile
from ...tracer.verified_file import FileCursor
from ..alarms.figures import Figure, read_token_figures
from ..alarms.repeats import Repeats
from ..facts.read_series import Given, on_steps, read_averages, read_given, read_logged, read_rows
from ..facts.series import KINDS, LINEAR, MISMATCH, Series
from ..trace.columns import read_hyperparameters
from ..trace.source import Pair, Source
from ..views import open_database

_SUMMED = ["num_prompt_tokens", "num_response_tokens"]
_COLUMNS = {SEQUENCES: ["step", "attempt", *_SUMMED], SCORES: ["step", "attempt", "pass"], METRICS: ["step", "attempt"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Row and token counts for one step. Rows are never removed or changed, so equal counts mean identical contents."""

    num_sequences: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_scores: int
    """Number of scores. Replays outside the compared pair are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    steps: dict[int, Extent]
    """Steps that have sequences or scores."""
    passes: frozenset[str]
    num_metrics: int
    """Number of logged values, including hyperparameters."""


@dataclass(frozen=True, slots=True)
class _Counted:
    by_step: pa.Table | None = None
    passes: frozenset[str] = frozenset()
    num_metrics: int = 0


class Surveyor:
    """Counts rows in a growing trace. Sealed files never change, so each is opened only once."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._newest: dict[int, int] = {}
        self._sealed: dict[str, _Counted] = {}

    def survey(self, source: Source) -> Extents:
        files = {entry.relative: (table, entry) for table in _COLUMNS for entry in source.files[table]}
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
        if self._newest:  # leave out steps that were trained again
            newest = pa.array([self._newest.get(step) for step in rows["step"].to_pylist()], pa.int32())
            rows = rows.filter(pc.fill_null(pc.equal(rows["attempt"], newest), True))
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


MOST_TOKENS = 10_000_000
"""Maximum number of response tokens read per refresh, newest steps first. The newest step is always read."""
RATE_STEPS = 20
"""Number of recent steps used to measure the training rate."""
Times = list[tuple[int, float]]
"""(step, seconds since 1970), ascending."""

_LOGGED_TIMES = """
SELECT step, epoch(max(logged_at)) FROM metrics WHERE step > 0 AND logged_at IS NOT NULL
GROUP BY step ORDER BY step DESC LIMIT $steps
"""


class Memory:
    """Cache of the series from `read_series`, except changed_weights, because computing that series would read all
    weight versions at every refresh."""

    def __init__(self, pair: Pair):
        self.repeats = Repeats()
        self.times: Times = []
        self._pair = pair
        self._read: dict[int, Extent] = {}
        self._given: Given = frozenset()
        self._basis: tuple[Given, Loss | None, bool] | None = None
        self._num_metrics = -1
        self._logged: list[Series] = []
        self._averages: dict[str, Figure] = {}
        self._series: dict[str, Series] = {}
        """Series of `read_series` and, under other names, metrics of `read_token_figures`, at the steps read so far."""

    def pending(self, extents: Extents) -> list[int]:
        if not self._read.keys() <= extents.steps.keys():
            self._forget()
        return sorted((step for step, extent in extents.steps.items() if self._read.get(step) != extent), reverse=True)

    def is_behind(self, extents: Extents) -> bool:
        return extents.num_metrics != self._num_metrics or bool(self.pending(extents))

    def read(self, source: Source, extents: Extents) -> None:
        """Read logged values and the newest unread steps. Raises DamagedTrace."""
        pending = self.pending(extents)
        # If no step has been read yet, read the pair's stored sums, which takes less time than reading tokens.
        summed = self._pair in source.covered and len(pending) == len(extents.steps)
        used = accumulate(extents.steps[step].num_response_tokens for step in pending)
        # Read consecutive steps, because alerts and change points compare neighbouring steps.
        newest = [step for step, num in zip(pending, used, strict=True) if step == pending[0] or num <= MOST_TOKENS]
        wanted = sorted(pending if summed else newest)
        database = open_database(source)
        if not summed:
            database.keep_steps(wanted)
        self._logged = read_logged(database, bool(extents.steps))
        self.times = database.connection.execute(_LOGGED_TIMES, {"steps": RATE_STEPS + 1}).fetchall()[::-1]
        self._averages = {} if extents.steps else read_averages(database)
        self._num_metrics = extents.num_metrics
        self._given = self._given | read_given(database)
        loss = read_loss(read_hyperparameters(database))
        basis = (self._given, loss, any(column.name == "entropy" for column in self._logged))
        if basis != self._basis and self._read:  # the run's settings changed, so cached steps are out of date
            self._forget()
        self._basis = basis
        if wanted:
            columns = [*chain(*read_rows(database, self._pair, self._logged, self._given))]
            figures = read_token_figures(database, self._pair)
            columns += [Series(name, *figure, LINEAR, MISMATCH) for name, figure in figures.items()]
            self._keep(wanted, {column.name: column for column in columns})
            self.repeats.keep(database, wanted)
            self._read |= {step: extents.steps[step] for step in wanted}

    def series(self, steps: Iterable[int]) -> dict[str, Series]:
        columns = [one for name, one in self._series.items() if name in KINDS]
        # Entropies recorded per token replace entropies logged per step.
        found = {column.name: column for column in (*self._logged, *columns) if len(column.steps)}
        every = np.unique(np.concatenate([np.fromiter(steps, np.int64), *(c.steps for c in found.values())]))
        every = every.astype(np.int64)
        return {name: on_steps(every, found[name]) for name in KINDS if name in found}

    def token_figures(self) -> dict[str, Figure]:
        found = {name: (one.steps, one.values) for name, one in self._series.items() if name not in KINDS}
        return self._averages | {name: figure for name, figure in found.items() if len(figure[0])}

    def _keep(self, steps: Sequence[int], columns: Mapping[str, Series]) -> None:
        for name, one in {**self._series, **columns}.items():
            none = replace(one, steps=one.steps[:0], values=one.values[:0], not_finite=one.not_finite[:0])
            self._series[name] = _updated(self._series.get(name, none), steps, columns.get(name, none))

    def _forget(self) -> None:
        self._read, self._series, self.repeats = {}, {}, Repeats()


def _updated(old: Series, steps: Sequence[int], new: Series) -> Series:
    """Replace the values of `old` at `steps` by those of `new`."""
    left = ~np.isin(old.steps, steps)
    pairs = ((old.steps, new.steps), (old.values, new.values))
    at, values = (np.concatenate([before[left], after]) for before, after in pairs)
    order = np.argsort(at)
    lost = np.union1d(np.setdiff1d(old.not_finite, steps), new.not_finite)
    return replace(new, steps=at[order], values=values[order], not_finite=lost)
