"""Stored results of `locate`, and the rows of the SQL views `operators` and `patches`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from ..schemas.errors import tell_damage
from ..schemas.located import OPERATORS, PATCHES
from ..schemas.tables import Table
from ..tracer.located.result_files import KeptResult, read_results
from .location import Location, location
from .trace.database import Database, cached


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedResult:
    """One stored result."""

    run: str
    """Name of the run in the database."""
    id: str
    """Id of the question that the result answers."""
    location: Location
    shares: Mapping[tuple[str, str], float]
    """(side, operator) -> share of the mean square mismatch that the operator accounts for; operators without a gradient are
    missing."""


@cached
def read_located(database: Database) -> tuple[LocatedResult, ...]:
    """Return the stored results for a database's steps, newest last; warn about unreadable ones."""
    found = []
    for source in database.sources:
        results, damaged = read_results(source.store)
        tell_damage(f"{sentence}; this locate result is left out" for sentence in damaged)
        steps = database.kept_steps.get(source.run)
        found += [_result(source.run, each) for each in results if steps is None or each.header.question.step in steps]
    return tuple(found)


def newest(database: Database) -> LocatedResult | None:
    """Return the newest stored result; None if none can be read."""
    return next(reversed(read_located(database)), None)


def _result(run: str, kept: KeptResult) -> LocatedResult:
    total = sum(each.sum_square for each in kept.header.sequences)
    shares = {key: sum(own.values()) / total for key, own in kept.found.products.items()} if total else {}
    return LocatedResult(run=run, id=kept.header.id, location=location(kept.found, kept=kept.relative), shares=shares)


def view_rows(database: Database) -> dict[str, pa.Table]:
    """Return the rows for both views: one row per result and operator, and one row per result and patch."""
    results = read_located(database)
    return {
        name: pa.Table.from_pylist(list(rows(results)), _schema(spec, more))
        for name, rows, spec, more in (
            (OPERATORS.name, _operator_rows, OPERATORS, ("carried",)),
            (PATCHES.name, _patch_rows, PATCHES, ("removed", "removed_low", "removed_high")),
        )
    }


def _schema(spec: Table, shares: Iterable[str]) -> pa.Schema:
    """Return the columns that identify the result, the table's columns other than lists, and the shares."""
    texts = [pa.field(name, pa.string()) for name in ("run", "result")]
    named = [*texts, pa.field("step", pa.int64()), pa.field("a", pa.string()), pa.field("b", pa.string())]
    kept = [pa.field(each.name, each.type) for each in spec.schema if not pa.types.is_list(each.type)]
    return pa.schema([*named, *kept, *(pa.field(name, pa.float64()) for name in shares)])


def _operator_rows(results: Iterable[LocatedResult]) -> Iterator[dict[str, Any]]:
    for result in results:
        for each in result.location.operators:
            row = asdict(each)
            share = result.shares.get((each.side, each.operator))
            yield _named(result) | {"forward_order": row.pop("order"), "carried": share} | row


def _patch_rows(results: Iterable[LocatedResult]) -> Iterator[dict[str, Any]]:
    for result in results:
        for each in result.location.patches:
            yield _named(result) | asdict(each)


def _named(result: LocatedResult) -> dict[str, Any]:
    found = result.location
    return {"run": result.run, "result": result.id, "step": found.step, "a": found.a, "b": found.b}
