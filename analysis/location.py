"""The result of `locate`, computed or read from a trace, and the rows for the SQL views `operators` and `patches`.

Shapes: S sequences in the selected step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import pyarrow as pa

from ..schemas.errors import tell_damage
from ..schemas.results import Result
from ..tracer.located import Findings, KeptResult, Located, OperatorError, read_results
from .rows import Rows, table
from .statistics.estimators import Array
from .statistics.intervals import Interval, NoInterval, ends, ratio_interval
from .trace.database import Database, cached

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShare:
    """Contribution of one operator kind or layer to mean d^2 in one execution."""

    side: str
    kind: str
    layer: int | None
    num_operators: int
    carried: float
    """Share of mean d^2 caused by these operators' own errors, to first order. Negative if they reduce the mismatch."""
    carried_low: float | None
    carried_high: float | None
    ratio: float
    """The largest ratio of an operator's error to its rounding bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchShare:
    """Reduction of mean d^2 if operators of one execution use the other execution's code."""

    patch: str
    taker: str
    num_operators: int
    removed: float
    """Share of mean d^2 that the patch removes. Negative if the patch increases the mismatch."""
    removed_low: float | None
    removed_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Location(Findings, Result):
    """First divergence of two executions at a step, and the contribution of each operator."""

    _text = "tim_trace.analysis.locate_text:location_text"

    num_sequences: int
    num_groups: int
    """Number of prompt groups. Intervals are computed by resampling groups."""
    no_interval: str | None
    """Why the shares have no interval, or None if they have one."""
    gap_rms: float
    """Root mean square of d = logprob(b) - logprob(a) (nats)."""
    explained: float | None
    """Share of mean d^2 that the errors of all operators together explain to first order. 1 if the errors do not
    interact, None if there is no mismatch."""
    kinds: tuple[OperatorShare, ...]
    layers: tuple[OperatorShare, ...]
    patches: tuple[PatchShare, ...]
    kept: str | None = None
    """The result's path in the trace, or None if the result was not stored."""
    not_kept: str | None = None
    """Why the result could not be stored. None if it was stored, or if `keep` is off."""


def location(found: Located, *, kept: str | None = None, not_kept: str | None = None) -> Location:
    square_S = np.array([each.sum_square for each in found.sequences])
    group_S = np.unique([each.group for each in found.sequences], return_inverse=True)[1]
    total = sum(each.sum_square for each in found.sequences)

    def interval(value_S: Array) -> Interval | NoInterval:
        return ratio_interval(value_S, square_S, group_S, _CONFIDENCE) if square_S.any() else NoInterval.UNDEFINED

    def share(value_S: Array) -> tuple[float, float | None, float | None]:
        low, high = ends(interval(value_S)) or (None, None)
        return float(value_S.sum()) / float(square_S.sum()) if total else 0.0, low, high

    kinds = _carried(found, share, lambda each: (each.side, each.kind, None))
    no_interval = interval(square_S / 2)
    patches = []
    for each in found.patches:
        removed, low, high = share(square_S - np.array(each.squares_left))
        patches.append(PatchShare(
            patch=each.patch, taker=each.taker, num_operators=each.num_operators, removed=removed, removed_low=low,
            removed_high=high,
        ))  # fmt: skip
    return Location(
        num_sequences=len(found.sequences), num_groups=len(set(group_S.tolist())), kinds=kinds, patches=tuple(patches),
        no_interval=no_interval.value if no_interval is NoInterval.FEW else None,
        gap_rms=(total / max(found.num_tokens, 1)) ** 0.5, explained=sum(each.carried for each in kinds) if total else None,
        layers=_carried(found, share, lambda each: (each.side, "", each.layer)), kept=kept, not_kept=not_kept,
        **{each.name: getattr(found, each.name) for each in fields(Findings)},
    )  # fmt: skip


def _carried(
    found: Located,
    share: Callable[[Array], tuple[float, float | None, float | None]],
    key: Callable[[OperatorError], tuple[str, str, int | None]],
) -> tuple[OperatorShare, ...]:
    groups: dict[tuple[str, str, int | None], list[OperatorError]] = {}
    for each in found.operators:
        if (each.side, each.operator) in found.products:
            groups.setdefault(key(each), []).append(each)
    place = {each.seq_id: index for index, each in enumerate(found.sequences)}
    rows = []
    for (side, kind, layer), members in groups.items():
        sums_S = np.zeros(len(place))
        for each in members:
            for seq_id, value in found.products[side, each.operator].items():
                sums_S[place[seq_id]] += value
        carried, low, high = share(sums_S)
        rows.append(OperatorShare(
            side=side, kind=kind, layer=layer, num_operators=len(members), carried=carried, carried_low=low,
            carried_high=high, ratio=max(each.ratio for each in members),
        ))  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.carried))


def location_rows(found: Location, by: str = "kind") -> Rows:
    tables: dict[str, Sequence[OperatorShare | OperatorError | PatchShare]] = {
        "kind": found.kinds, "operator": found.operators, "layer": found.layers, "patch": found.patches,
    }  # fmt: skip
    return table(tables[by]).without({"kind": ("layer",), "layer": ("kind",)}.get(by, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedResult:
    run: str
    id: str
    location: Location
    shares: Mapping[tuple[str, str], float]


@cached
def read_located(database: Database) -> tuple[LocatedResult, ...]:
    found = []
    for source in database.sources:
        results, damaged = read_results(source.store)
        tell_damage(f"{sentence}; this locate result is left out" for sentence in damaged)
        steps = database.kept_steps.get(source.run)
        found += [_result(source.run, each) for each in results if steps is None or each.found.step in steps]
    return tuple(found)


def newest(database: Database) -> LocatedResult | None:
    return next(reversed(read_located(database)), None)


def _result(run: str, kept: KeptResult) -> LocatedResult:
    total = sum(each.sum_square for each in kept.found.sequences)
    shares = {key: sum(own.values()) / total for key, own in kept.found.products.items()} if total else {}
    return LocatedResult(run=run, id=kept.id, location=location(kept.found, kept=kept.relative), shares=shares)


def view_rows(database: Database) -> dict[str, pa.Table]:
    operators, patches = list[dict[str, object]](), list[dict[str, object]]()
    for result in read_located(database):
        found = result.location
        named = {"run": result.run, "result": result.id, "step": found.step, "a": found.a, "b": found.b}
        for each in found.operators:
            share = result.shares.get((each.side, each.operator))
            operators.append(named | asdict(each) | {"forward_order": each.order, "carried": share})
        patches += [named | asdict(each) for each in found.patches]
    return {
        "operators": pa.Table.from_pylist(operators, _schema(OperatorError, carried="float")),
        "patches": pa.Table.from_pylist(patches, _schema(PatchShare)),
    }


_ARROW = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}


def _schema(kind: type, **more: str) -> pa.Schema:
    named = {"run": "str", "result": "str", "step": "int", "a": "str", "b": "str"}
    own = {"forward_order" if each.name == "order" else each.name: str(each.type) for each in fields(kind)}
    columns = named | own | more
    return pa.schema([pa.field(name, _ARROW[type.partition(" ")[0]]) for name, type in columns.items()])
