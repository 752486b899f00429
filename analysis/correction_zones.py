"""Sum tokens by zone. A zone is an interval of token ratios between adjacent bounds of the corrections.

Within a zone, a correction weights all tokens by the same formula, so sums over the tokens are enough to apply it. A
sequence's sums depend only on its own tokens, so they are the same, bit for bit, for any batching.

Shapes: T tokens from several sequences, concatenated. G groups, each holding one sequence's tokens with the same
advantage sign and zone.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import duckdb
import numpy as np
import pyarrow as pa

from .statistics.estimators import Array
from .trace.macros import struct_sql
from .trace.pair_sums import expm1_minus
from .trace.ragged import Column, Tokens, blocks, struct_fields, tokens_of

FUNCTION = "correction_zones_of"

KEYS = ("step", "seq_id", "iteration_a", "iteration_b")
TYPES = {
    "sign": "INTEGER", "zone": "INTEGER", "num_tokens": "BIGINT", "num_nan": "BIGINT", "num_inf": "BIGINT", "ratio": "DOUBLE",
    "sum_ratio": "DOUBLE", "sum_ratio2": "DOUBLE", "sum_abs_growth": "DOUBLE", "sum_abs_advantage": "DOUBLE", "sum_d": "DOUBLE",
    "sum_c": "DOUBLE", "sum_k3": "DOUBLE", "max_k2": "DOUBLE", "min_ratio": "DOUBLE",
}  # fmt: skip
"""A group's columns with their SQL types, documented in corrections.sql."""
_FIELDS = struct_fields(TYPES)

_MOST = 20.0
"""Exponents are clamped to +-20 nats, as in verl. exp(20) is 4.9e8."""
_SIGNS = 4
"""Advantage classes: negative, zero, positive, and non-finite or missing."""

Bounds = tuple[tuple[float, ...], tuple[float, ...]]
"""Lower bounds and upper bounds on token ratios, collected from all rules."""


def register(connection: duckdb.DuckDBPyConnection, bounds: Bounds) -> None:
    """Register `correction_zones_of(a, b, mask, advantage, advantages)`, which returns each sequence's groups of
    tokens as a list."""
    with suppress(duckdb.InvalidInputException):  # raised if the function is not registered yet
        connection.remove_function(FUNCTION)
    connection.create_function(
        FUNCTION, partial(_of_lists, bounds), ["FLOAT[]", "FLOAT[]", "BOOLEAN[]", "DOUBLE", "FLOAT[]"],
        f"{struct_sql(TYPES)}[]", type="arrow", null_handling="special",
    )  # fmt: skip


def zones_of_rows(bounds: Bounds, rows: pa.RecordBatch) -> pa.RecordBatch:
    names = ("logprobs_a", "logprobs_b", "mask", "advantage", "advantages")
    row_G, columns = _groups(bounds, *(rows.column(name) for name in names))
    keys = [rows.column(name).take(pa.array(row_G)) for name in KEYS]
    return pa.RecordBatch.from_arrays([*keys, *columns], [*KEYS, *TYPES])


def _of_lists(
    bounds: Bounds, a: Column, b: Column, mask: Column, advantage: Column, advantages: Column
) -> pa.ListArray:
    row_G, columns = _groups(bounds, a, b, mask, advantage, advantages)
    ends_N = np.searchsorted(row_G, np.arange(len(a) + 1)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends_N), pa.StructArray.from_arrays(columns, fields=_FIELDS))


def _groups(
    bounds: Bounds, a: Column, b: Column, mask: Column, advantage: Column, advantages: Column
) -> tuple[np.ndarray, list[pa.Array]]:
    one = advantage.combine_chunks() if isinstance(advantage, pa.ChunkedArray) else advantage
    tokens = tokens_of({"a": a, "b": b}, mask=mask, advantage=one.fill_null(np.nan), advantages=advantages)
    kept = tokens.where(tokens.counted_T)
    full_N = np.flatnonzero(kept.lengths_N)
    full = Tokens(
        logprobs=kept.logprobs, lengths_N=kept.lengths_N[full_N], advantage_T=kept.advantage_T,
        advantage_N=None if kept.advantage_N is None else kept.advantage_N[full_N],
    )  # fmt: skip
    rows: list[np.ndarray] = [np.empty(0, np.int64)]
    parts: list[dict[str, Array]] = []
    for sequences, span, _ in blocks(full.lengths_N):
        with np.errstate(over="ignore", invalid="ignore"):
            row_G, part = _of_block(bounds, full.cut(sequences, span))
        rows.append(full_N[sequences][row_G])
        parts.append(part)
    found = {name: np.concatenate([np.empty(0), *(part[name] for part in parts)]) for name in TYPES}
    return np.concatenate(rows), [pa.array(found[field.name], from_pandas=True).cast(field.type) for field in _FIELDS]


def _of_block(bounds: Bounds, tokens: Tokens) -> tuple[np.ndarray, dict[str, Array]]:
    a_T, b_T, row_T = tokens.logprobs["a"], tokens.logprobs["b"], tokens.sequence_T
    assert tokens.advantage_N is not None
    own_T = np.repeat(tokens.advantage_N, tokens.lengths_N) if tokens.advantage_T is None else tokens.advantage_T
    nan_T, finite_T = np.isnan(a_T) | np.isnan(b_T), np.isfinite(a_T) & np.isfinite(b_T)
    d_T = np.where(finite_T, a_T - b_T, 0.0)
    c_T = np.clip(d_T, -_MOST, _MOST)
    ratio_T, growth_T = np.exp(c_T), np.expm1(c_T)
    lows, highs = (np.array(side) for side in bounds)
    num_zones = len(lows) + len(highs) + 1
    zone_T = np.searchsorted(lows, ratio_T, "right") + np.searchsorted(highs, ratio_T, "left")
    sign_T = np.where(np.isfinite(own_T), np.sign(own_T), 2).astype(np.int64) + 1
    # Tokens without a finite ratio go into an extra zone after the last one.
    cell_T = (row_T * _SIGNS + sign_T) * (num_zones + 1) + np.where(finite_T, zone_T, num_zones)
    cells, group_T, num_G = np.unique(cell_T, return_inverse=True, return_counts=True)
    row_G, sign_G, zone_G = np.unravel_index(cells, (len(tokens.lengths_N), _SIGNS, num_zones + 1))
    inside_G, signed_G = zone_G < num_zones, sign_G < _SIGNS - 1
    num_nan_G = np.bincount(group_T, nan_T, len(cells))

    def total(values_T: Array) -> Array:
        return np.where(inside_G, np.bincount(group_T, values_T, len(cells)), np.nan)

    # max_k2 and min_ratio cover the whole sequence, so they are the same in all of its groups. `ratio` is the ratio of
    # an arbitrary token in the group.
    starts_N = tokens.starts_N
    max_k2_N = np.maximum.reduceat(np.where(finite_T, c_T * c_T / 2, -np.inf), starts_N)
    min_ratio_N = np.minimum.reduceat(np.where(finite_T, ratio_T, np.inf), starts_N)
    one_G = np.empty(len(cells))
    one_G[group_T] = ratio_T
    return row_G, {
        "sign": np.where(signed_G, sign_G - 1.0, np.nan),
        "zone": np.where(inside_G, zone_G.astype(np.float64), np.nan),
        "num_tokens": np.where(inside_G, num_G, 0.0),
        "num_nan": num_nan_G,
        "num_inf": np.where(inside_G, 0.0, num_G - num_nan_G),
        "ratio": np.where(inside_G, one_G, np.nan),
        "sum_ratio": total(ratio_T),
        "sum_ratio2": total(ratio_T * ratio_T),
        "sum_abs_growth": total(np.abs(growth_T)),
        "sum_abs_advantage": np.where(signed_G, total(np.where(np.isfinite(own_T), np.abs(own_T), 0.0)), np.nan),
        "sum_d": total(d_T),
        "sum_c": total(c_T),
        "sum_k3": total(expm1_minus(c_T, growth_T)),
        "max_k2": np.where(inside_G, max_k2_N[row_G], np.nan),
        "min_ratio": np.where(inside_G, min_ratio_N[row_G], np.nan),
    }  # fmt: skip
