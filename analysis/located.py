"""The results of `locate` that lie in traces, and the rows of the SQL views `operators` and `patches`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from ..schemas.errors import tell_damage
from ..schemas.located import OPERATORS, PATCHES
from ..schemas.tables import Table
from ..tracer.located.result_files import KeptResult, read_results
from ..tracer.located.result_header import LocateQuestion
from .location import Location, location
from .trace.cache import cached
from .trace.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedResult:
    """One kept result."""

    run: str
    """Name of the run in the database."""
    id: str
    """Of its question."""
    question: LocateQuestion
    made_at: str
    """ISO 8601 in UTC."""
    made_by: str
    """Version of tim-trace."""
    versions: Mapping[str, str]
    """Libraries that can change a logprob -> version."""
    location: Location
    shares: Mapping[tuple[str, str], float]
    """(side, operator) -> what it carries of the gap's mean square; of those that were carried back."""


@cached
def read_located(database: Database) -> tuple[LocatedResult, ...]:
    """The kept results of the steps that a database holds, the newest last; warns of those that cannot be read."""
    found = []
    for source in database.sources:
        results, damaged = read_results(source.store)
        tell_damage(f"{sentence}; this result of locate is in no answer" for sentence in damaged)
        steps = database.kept_steps.get(source.run)
        found += [_result(source.run, each) for each in results if steps is None or each.header.question.step in steps]
    return tuple(found)


def newest(database: Database) -> LocatedResult | None:
    """The newest kept result; None where there is none that can be read."""
    return next(reversed(read_located(database)), None)


def _result(run: str, kept: KeptResult) -> LocatedResult:
    header = kept.header
    total = sum(each.sum_square for each in header.sequences)
    return LocatedResult(
        run=run, id=header.id, question=header.question, made_at=header.made_at, made_by=header.made_by,
        versions=header.versions, location=location(kept.found, kept=kept.relative),
        shares={key: sum(own.values()) / total for key, own in kept.found.products().items()} if total else {},
    )  # fmt: skip


def view_rows(database: Database) -> dict[str, pa.Table]:
    """View -> its rows: a row a (result, operator), and a row a (result, patch)."""
    results = read_located(database)
    return {
        name: pa.Table.from_pylist(list(rows(results)), _schema(spec, more))
        for name, rows, spec, more in (
            (OPERATORS.name, _operator_rows, OPERATORS, ("carried",)),
            (PATCHES.name, _patch_rows, PATCHES, ("removed", "removed_low", "removed_high")),
        )
    }


def _schema(spec: Table, shares: Iterable[str]) -> pa.Schema:
    """Columns of a view: those of the table that are no list, after those that name the result, and before its shares."""
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
