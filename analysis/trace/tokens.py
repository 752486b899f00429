"""Read tokens in batches, from sequences joined with scores. A Ray cluster can share the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from ...schemas.errors import InvalidOption
from ...tracer.cluster import run_units
from .connection import limit_threads
from .database import Database, cached
from .macros import Catalogue, quoted
from .ragged import Tokens, tokens_of
from .table_views import step_condition

_LISTS = {
    "mask": "coalesce(s.response_mask, []::BOOLEAN[])",
    "advantage": "s.advantage",
    "advantages": "coalesce(s.advantages, []::FLOAT[])",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    name: str
    iteration: int | None = 0
    """The inner iteration to read. None reads all of them, with one row each."""
    scored: bool = True
    """True skips rows without logprobs. False returns them with an empty list of logprobs."""
    optional: bool = False
    """True includes sequences without scores in this pass, with an empty list of logprobs."""
    logprobs: bool = True


def token_query(
    passes: Mapping[str, PassRows], rows: Sequence[str], *, run: str | None = None, steps: Sequence[int] | None = None,
    keys: str = "", lists: Sequence[str] = (), of_sequences: bool = False, order: str = "",
) -> str:  # fmt: skip
    """Write an SQL query that returns one row per sequence that every required pass scored.

    `rows` are SQL expressions for the columns. They refer to the sequence as `s`, and to passes by their keys in
    `passes`. If `steps` is a range, all steps in it are read. `keys` is an SQL condition that applies to every table.
    `sequences` is joined only if needed, because the join takes a third of the query's time.
    """
    within = _within(run, steps, keys)
    given = [name for name, scored in passes.items() if scored.scored and not scored.optional]
    columns = [*rows]
    columns += [
        f"{name}.logprobs AS {name}" if name in given else f"coalesce({name}.logprobs, []::FLOAT[]) AS {name}"
        for name, scored in passes.items()
        if scored.logprobs
    ]
    columns += [f"{_LISTS[name]} AS {name}" for name in lists]
    tables = []
    for name, scored in passes.items():
        iteration = "" if scored.iteration is None else f" AND iteration = {scored.iteration}"
        terms = f'"pass" = {quoted(scored.name)}{iteration}' + (" AND logprobs IS NOT NULL" if scored.scored else "")
        tables.append((name, f"(SELECT * FROM scores WHERE {within} AND {terms})", scored.optional))
    if of_sequences or lists:
        tables.insert(0, ("s", f"(SELECT * FROM sequences WHERE {within})", False))
    (base, table, _), *others = sorted(tables, key=lambda entry: entry[2])
    joins, joined_by = [f"{table} AS {base}"], ("step", "seq_id") if run else ("run", "step", "seq_id")
    for name, other, optional in others:
        on = " AND ".join(f"{name}.{key} = {base}.{key}" for key in joined_by)
        joins.append(f"{'LEFT JOIN' if optional else 'JOIN'} {other} AS {name} ON {on}")
    return f"SELECT {', '.join(columns)} FROM {' '.join(joins)}{f' ORDER BY {order}' if order else ''}"


def tokens_of_rows(rows: pa.RecordBatch | pa.Table, passes: Sequence[str]) -> Tokens:
    lists = {name: rows.column(name) for name in ("mask", "advantage", "advantages") if name in rows.schema.names}
    return tokens_of({name: rows.column(name) for name in passes}, **lists)


def _within(run: str | None, steps: Sequence[int] | None, keys: str) -> str:
    terms = [] if run is None else [f"run = {quoted(run)}"]
    if steps is not None:
        terms.append(step_condition(steps))
    return " AND ".join([*terms, keys] if keys else terms) or "true"


CHUNK_TOKENS = 32 << 20

CHUNK_STEPS = 1024


@cached
def tokens_by_step(database: Database, run: str | None = None) -> dict[int, int]:
    query = """
        SELECT step, sum(num_response_tokens)::BIGINT FROM sequences WHERE $run IS NULL OR run = $run
        GROUP BY step ORDER BY step
    """
    return dict(database.connection.execute(query, {"run": run}).fetchall())


def step_ranges(tokens: Mapping[int, int], most_tokens: int = CHUNK_TOKENS) -> list[range]:
    """Split steps into ranges of up to `most_tokens` tokens and CHUNK_STEPS steps. A larger step gets its own range.

    >>> step_ranges({1: 10, 2: 20, 5: CHUNK_TOKENS})
    [range(1, 3), range(5, 6)]
    """
    parts = packed(tokens.items(), lambda step: (step[1], 1), (most_tokens, CHUNK_STEPS))
    return [range(part[0][0], part[-1][0] + 1) for part in parts]


def evenly_spaced(steps: Sequence[int], most: int) -> list[int]:
    """Return up to `most` evenly spaced steps, endpoints included, or only the first if `most` is 1.

    >>> evenly_spaced([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if most <= 0 or not steps:
        return []
    places = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
    return [steps[place] for place in places]


def evenly_within(steps: Sequence[int], most: int) -> list[int]:
    """Return up to `most` evenly spaced steps, endpoints included, or only the middle one if `most` is 1.

    >>> evenly_within([1, 2, 3, 4, 5], 1)
    [3]
    """
    return [steps[len(steps) // 2]] if most == 1 and steps else evenly_spaced(steps, most)


def neighbouring_pairs(steps: Sequence[int], most: int) -> list[int]:
    """Return evenly spaced pairs of neighbouring steps, up to `most` steps in total.

    >>> neighbouring_pairs([1, 2, 3, 4, 5, 6], 4)
    [1, 2, 5, 6]
    """
    if len(steps) <= most:
        return list(steps)
    pairs = most // 2
    firsts = np.linspace(0, len(steps) - 2, pairs).astype(int) if pairs > 1 else [(len(steps) - 1) // 2]
    return sorted({steps[place + more] for place in firsts for more in (0, 1)})


def fitting(steps: Iterable[int], tokens: Mapping[int, int], max_tokens: int) -> set[int]:
    """Choose the first step and then, in the given order, every step that fits within `max_tokens` tokens in total.

    >>> fitting([3, 1, 2], {1: 5, 2: 1, 3: 4}, 6)
    {2, 3}
    """
    chosen: set[int] = set()
    used = 0
    for step in steps:
        if step not in chosen and (not chosen or used + tokens[step] <= max_tokens):
            chosen.add(step)
            used += tokens[step]
    return chosen


# --- Work units for this process or for Ray actors

Unit = TypeVar("Unit")
Made = TypeVar("Made")
Item = TypeVar("Item")

CPUS = 4
"""Number of CPUs per actor. Reading is multithreaded and every actor must open the traces, so a few actors with several
CPUs each are best."""

UNITS = 64
"""Minimum number of units into which the work is divided on a cluster. With many units, actors that finish early can
take more of them."""


def spread(
    database: Database, function: Callable[[Database, Unit], Iterable[Made]], units: Sequence[Unit]
) -> Iterator[Made]:
    """Yield results from `function(database, unit)` lazily and in order. On a cluster (`database.ray`), each actor
    opens the traces itself, so all arguments must be picklable. Raises InvalidOption if a trace is being recorded, and
    any error from `run_units`."""
    if database.ray is None:
        return (made for unit in units for made in function(database, unit))
    return _in_order(database.ray, _Reader(places(database), database.steps, database.catalogue, function), units)


def _in_order(address: str, reader: _Reader[Unit, Made], units: Sequence[Unit]) -> Iterator[Made]:
    if not units:
        return
    ended: dict[int, list[Made]] = {}
    wanted = 0
    for number, made in run_units(address, reader, units, num_cpus=CPUS, num_gpus=0):
        ended[number] = made
        while wanted in ended:
            yield from ended.pop(wanted)
            wanted += 1


def unit_tokens(database: Database, most: int, num_tokens: int) -> int:
    return most if database.ray is None else max(min(most, num_tokens // UNITS), 1)


def packed(items: Iterable[Item], size: Callable[[Item], Sequence[int]], most: Sequence[int]) -> Iterator[list[Item]]:
    """Group neighbouring items up to the total size `most`. An item that is larger than `most` gets its own group.

    >>> list(packed([1, 2, 5, 1], lambda item: (item,), (4,)))
    [[1, 2], [5], [1]]
    """
    batch: list[Item] = []
    total: Sequence[int] = ()
    for item in items:
        own = size(item)
        total = [a + b for a, b in zip(total, own, strict=True)] if batch else own
        if batch and any(used > limit for used, limit in zip(total, most, strict=True)):
            yield batch
            batch, total = [], own
        batch.append(item)
    if batch:
        yield batch


def places(database: Database) -> tuple[str, ...]:
    """Return the traces' paths or URLs, for actors to open. Raises InvalidOption if a trace is being recorded."""
    for source in database.sources:
        if source.is_live or source.journals:
            raise InvalidOption(
                f"{source.store.url} is still being recorded or was never finished, so nodes could read different "
                "rows; run the command without a cluster",
                option="ray",
            )
    return tuple(
        os.path.abspath(source.store.root) if source.store.is_local else source.store.url for source in database.sources
    )


@dataclass(slots=True)
class _Reader(Generic[Unit, Made]):
    traces: tuple[str, ...]
    steps: str
    catalogue: Callable[[], Catalogue[Database]]
    function: Callable[[Database, Unit], Iterable[Made]]
    database: Database | None = None

    def run(self, unit: Unit) -> list[Made]:
        if self.database is None:
            limit_threads(CPUS)
            self.database = Database(self.traces, self.steps, catalogue=self.catalogue)
        return list(self.function(self.database, unit))

    def close(self) -> None:
        """Do nothing, because a reader has nothing to flush."""
