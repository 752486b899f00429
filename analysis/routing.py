"""Measure how well the router choices of two passes agree, for the macros in sql/routing.sql.

Shapes: N tokens in a sequence, L layers with a router, S experts selected per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from ..schemas.errors import InvalidQuery
from ..tracer.routing import NOT_ROUTED, Routing, read_routing
from ..tracer.store import Store
from .trace.database import Database
from .trace.macros import MacroFile, sql_file, struct_sql
from .trace.ragged import Column, struct_fields
from .trace.source import Source

FUNCTIONS = ("routing_sums_of", "routing_counts_of")
"""Names of two SQL functions. The first returns a sequence's agreement by layer, the second by token."""

_ARGUMENTS = ["VARCHAR", "VARCHAR", "BIGINT", "VARCHAR", "BIGINT", "BIGINT"]
"""Types of both functions' arguments: the run, the Zarr group and first row in pass a, the Zarr group and first row in
pass b, and the number of tokens."""
_SUMS = {
    "num_tokens": "BIGINT", "num_same_experts": "BIGINT", "num_same_order": "BIGINT", "sum_overlap": "DOUBLE",
    "num_weights": "BIGINT", "sum_abs_dweight": "DOUBLE",
}  # fmt: skip
"""Column -> SQL type. The columns are the sums of Agreement's fields over tokens, in the same order."""
_COUNTS = {"num_layers": "BIGINT", "num_layers_differing": "BIGINT"}


class Agreement(NamedTuple):
    """Agreement between two passes' router choices, by token and layer."""

    known_NL: np.ndarray
    """True if both passes routed the token in this layer."""
    same_experts_NL: np.ndarray
    """True if both passes chose the same set of experts."""
    same_order_NL: np.ndarray
    """True if both passes chose the same experts in the same slots."""
    overlap_NL: np.ndarray
    """Number of experts in common, divided by S. If S differs between the passes, the larger S is used."""
    num_weights_NL: np.ndarray
    """Number of common experts that have weights in both passes."""
    abs_dweight_NL: np.ndarray
    """Sum of |weight a - weight b| over the common experts that have weights in both passes."""


def compare(a: Routing, b: Routing) -> Agreement:
    """Compare two passes' router choices for the same tokens. Raises InvalidQuery if their layer counts differ."""
    ids_a, ids_b = np.asarray(a.expert_ids, np.int64), np.asarray(b.expert_ids, np.int64)
    if ids_a.shape[1] != ids_b.shape[1]:
        raise InvalidQuery(f"routing: one pass has {ids_a.shape[1]} layers with a router, the other {ids_b.shape[1]}")
    known_NL = (ids_a[:, :, 0] != NOT_ROUTED) & (ids_b[:, :, 0] != NOT_ROUTED)
    common_NLSS = (ids_a[..., :, None] == ids_b[..., None, :]) & known_NL[..., None, None]
    num_common_NL = common_NLSS.any(axis=-1).sum(axis=-1)
    slots_a, slots_b = ids_a.shape[2], ids_b.shape[2]
    as_many = slots_a == slots_b
    num_weights_NL, abs_dweight_NL = np.zeros_like(num_common_NL), np.zeros(num_common_NL.shape)
    if a.expert_weights is not None and b.expert_weights is not None:
        weights_a, weights_b = np.asarray(a.expert_weights, np.float64), np.asarray(b.expert_weights, np.float64)
        gaps_NLSS = np.abs(weights_a[..., :, None] - weights_b[..., None, :])
        num_weights_NL = num_common_NL
        abs_dweight_NL = np.where(common_NLSS, gaps_NLSS, 0.0).sum(axis=(-1, -2))
    return Agreement(
        known_NL=known_NL, same_experts_NL=known_NL & as_many & (num_common_NL == slots_a),
        same_order_NL=known_NL & ((ids_a == ids_b).all(axis=-1) if as_many else False),
        overlap_NL=num_common_NL / max(slots_a, slots_b), num_weights_NL=num_weights_NL,
        abs_dweight_NL=abs_dweight_NL,
    )  # fmt: skip


def by_layer(found: Agreement) -> list[dict[str, float]]:
    sums = [values_NL.sum(axis=0).tolist() for values_NL in found]
    return [dict(zip(_SUMS, layer, strict=True)) for layer in zip(*sums, strict=True)]


def by_token(found: Agreement) -> list[dict[str, float]]:
    known, same = found.known_NL.sum(axis=1).tolist(), found.same_experts_NL.sum(axis=1).tolist()
    return [
        {"num_layers": layers, "num_layers_differing": layers - equal}
        for layers, equal in zip(known, same, strict=True)
    ]


def register(connection: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> None:
    """Register `routing_sums_of` and `routing_counts_of`, which read Zarr groups in the traces.

    Both functions open only the traces' dense/ folders, so queries that may read only the traces can call them.
    """
    stores = {source.run: source.store for source in sources}

    def define(name: str, types: dict[str, str], rows_of: Callable[[Agreement], list[dict[str, float]]]) -> None:
        kind = pa.list_(pa.struct(struct_fields(types)))

        def function(
            run: Column, group_a: Column, start_a: Column, group_b: Column, start_b: Column, num_tokens: Column
        ) -> pa.Array:
            found = _compared(stores, run, (group_a, start_a), (group_b, start_b), num_tokens)
            return pa.array([rows_of(row) for row in found], kind)

        connection.create_function(name, function, _ARGUMENTS, f"{struct_sql(types)}[]", type="arrow")

    define(FUNCTIONS[0], _SUMS, by_layer)
    define(FUNCTIONS[1], _COUNTS, by_token)


MACROS = MacroFile[Database](
    name="routing", sql=sql_file("routing"), functions=FUNCTIONS,
    register=lambda database: register(database.connection.raw, database.sources),
)  # fmt: skip


def _compared(
    stores: dict[str, Store], run: Column, a: tuple[Column, Column], b: tuple[Column, Column], num_tokens: Column
) -> list[Agreement]:
    runs, counts = run.to_pylist(), num_tokens.to_pylist()
    sides = [_read(stores, runs, group.to_pylist(), start.to_pylist(), counts) for group, start in (a, b)]
    return [compare(one, other) for one, other in zip(*sides, strict=True)]


def _read(
    stores: dict[str, Store], runs: list[str], groups: list[str], starts: list[int], counts: list[int]
) -> list[Routing]:
    found: dict[int, Routing] = {}
    for run in set(runs):
        rows = [row for row, name in enumerate(runs) if name == run]
        places = [(groups[row], starts[row], counts[row]) for row in rows]
        if run not in stores or any(".." in group.split("/") or min(start, n) < 0 for group, start, n in places):
            raise InvalidQuery(
                f"routing: run {run!r} has no rows at this position; pass the columns run, routing and routing_start "
                "of scores"
            )
        found |= zip(rows, read_routing(stores[run], places), strict=True)
    return [found[row] for row in range(len(runs))]
