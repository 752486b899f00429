"""Compute per-sequence sums (schemas.sums) from tokens.

To avoid cancellation, ratios exp(d) are divided by the sequence's largest ratio before they are summed, and
probabilities are centred before they are squared. Such sums can be merged over sequences (Chan, Golub and LeVeque 1983,
Algorithms for computing the sample variance). A sequence's sums are bitwise identical for any batching.

Shapes: T tokens from several sequences, concatenated, N sequences, B sequences in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas.sums import SEQUENCE_SUMS
from ..statistics.estimators import Array
from ..statistics.moments import Centred, centred, co_moment, repeated
from .connection import Connection
from .ragged import Column, Tokens, array_of, blocks, tokens_of

KEYS = ("run", "step", "seq_id", "iteration_a", "iteration_b")

COUNTS = ("num_tokens", "num_nan", "num_inf")

OF_DIFFERENCES = (
    "sum_d", "sum_abs_d", "sum_d2", "sum_k3", "max_abs_d", "sum_expm1_d", "sum_expm1_2d", "peak_d", "sum_weight",
    "sum_weight2", "num_outside", "sum_prob_diff", "max_prob_diff",
)  # fmt: skip

SUM_EXP_ABS_D = "sum_exp_abs_d"
"""Sum of exp(|d|), with |d| capped at 700 nats. It is computed on request and never stored."""

OF_PROBABILITIES = (
    "peak_a", "peak_b", "mean_fall_a", "mean_fall_b", "spread_prob_a", "spread_prob_b", "spread_prob_ab",
)  # fmt: skip

Sizes = list[tuple[str, int, np.ndarray]]
"""Entries (run, step, float64 |d| [T]), for the tokens in the loss with finite logprobs in both passes."""

FUNCTION = "pair_sums_of"

BATCH_ROWS = 256
"""Number of rows in a batch of long sequences. It is small, because several batches wait in a queue."""
BATCH_TOKENS, MAX_BATCH_ROWS = 1 << 17, 1 << 13

_TYPES = {column.name: column.type for column in SEQUENCE_SUMS.columns}
_COLUMNS = (*COUNTS, *OF_DIFFERENCES, *OF_PROBABILITIES)
_STRUCT = ", ".join(f"{name} {'BIGINT' if _TYPES[name] == pa.int64() else 'DOUBLE'}" for name in _COLUMNS)

_LOWER, _UPPER = float(np.log(0.8)), float(np.log(1.25))

_TINY = -700.0
"""Below this logprob (nats), exp(logprob) loses precision."""

_SERIES = 0.0625
"""Below this |d|, exp(d) - 1 - d uses a power series up to d^10 (relative error 1e-18)."""
_FACTORIALS = np.cumprod(np.arange(1.0, 11.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteTokens:
    """Tokens in the loss with finite logprobs in both passes."""

    a_T: np.ndarray
    b_T: np.ndarray
    num_tokens_N: np.ndarray
    num_nan_N: np.ndarray
    num_inf_N: np.ndarray
    """Number of tokens whose logprob is infinite in at least one pass, and NaN in none."""


def register(connection: duckdb.DuckDBPyConnection) -> None:
    """Register `pair_sums_of(a FLOAT[], b FLOAT[], mask BOOLEAN[])`. With an empty mask, every token counts."""
    lists = ["FLOAT[]", "FLOAT[]", "BOOLEAN[]"]
    connection.create_function(FUNCTION, _of_lists, lists, f"STRUCT({_STRUCT})", type="arrow")


def computed(connection: Connection, pair_lists: str, mean_tokens: float) -> Iterator[tuple[pa.RecordBatch, Sizes]]:
    return connection.mapped_batches(pair_lists, _of_rows, _batch_rows(mean_tokens))


def sizes_read(connection: Connection, pair_lists: str, mean_tokens: float) -> Iterator[Sizes]:
    return connection.mapped_batches(
        pair_lists, lambda rows: sizes_of(rows, _finite_of_rows(rows)), _batch_rows(mean_tokens)
    )


def _batch_rows(mean_tokens: float) -> int:
    return max(BATCH_ROWS, min(int(BATCH_TOKENS / max(mean_tokens, 1)), MAX_BATCH_ROWS))


def finite(tokens: Tokens) -> FiniteTokens:
    counted = tokens.where(tokens.counted_T)
    a_T, b_T = counted.logprobs["a"], counted.logprobs["b"]
    finite_T = np.isfinite(a_T) & np.isfinite(b_T)
    num_nan_N = num_inf_N = np.zeros(len(tokens.lengths_N), np.int64)
    if not finite_T.all():
        nan_T = np.isnan(a_T) | np.isnan(b_T)
        num_nan_N, num_inf_N = (counted.where(kind_T).lengths_N for kind_T in (nan_T, ~finite_T & ~nan_T))
    kept = counted.where(finite_T)
    return FiniteTokens(
        a_T=kept.logprobs["a"], b_T=kept.logprobs["b"], num_tokens_N=kept.lengths_N, num_nan_N=num_nan_N,
        num_inf_N=num_inf_N,
    )  # fmt: skip


def pair_sums(tokens: FiniteTokens, names: tuple[str, ...] = _COLUMNS) -> dict[str, np.ndarray]:
    """Return columns of schemas.sums by name, [N]. For sequences without a finite token, the values are 0."""
    found = {"num_tokens": tokens.num_tokens_N, "num_nan": tokens.num_nan_N, "num_inf": tokens.num_inf_N}
    full_N = np.flatnonzero(tokens.num_tokens_N > 0)
    sums = {name: np.zeros(len(tokens.num_tokens_N)) for name in names if name not in found}
    for rows, within, starts_B in blocks(tokens.num_tokens_N[full_N]):
        a_T, b_T = (side_T[within].astype(np.float64) for side_T in (tokens.a_T, tokens.b_T))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            of_block = difference_sums(a_T, b_T, starts_B, sums.keys() - {*OF_PROBABILITIES})
            if any(name in sums for name in OF_PROBABILITIES):
                of_block |= probability_sums(a_T, b_T, starts_B)
        for name in sums:
            sums[name][full_N[rows]] = of_block[name]
    return {name: found[name] if name in found else sums[name] for name in names}


def difference_sums(
    a_T: Array, b_T: Array, starts_B: np.ndarray, names: Iterable[str] = OF_DIFFERENCES
) -> dict[str, Array]:
    """Return the sums that `names` lists, [B]. `starts_B` contains the index of each sequence's first token."""
    # Local variables instead of cached properties, which would make threads wait for a lock.
    d_T, asked = a_T - b_T, frozenset(names)
    size_T, peak_B = np.abs(d_T), np.maximum.reduceat(d_T, starts_B)
    growth_T = weight_T = prob_diff_T = d_T
    if asked & _OF_GROWTH:
        growth_T = np.expm1(d_T)
    if asked & _OF_WEIGHTS:
        weight_T = np.exp(d_T - repeated(peak_B, starts_B, len(d_T)))
    if asked & _OF_PROB_DIFF:
        prob_diff_T = prob_differences(a_T, b_T, growth_T)
    terms: dict[str, Callable[[], Array]] = {
        "sum_d": lambda: d_T, "sum_abs_d": lambda: size_T, "sum_d2": lambda: d_T * d_T,
        "sum_k3": lambda: expm1_minus(d_T, growth_T), "sum_expm1_d": lambda: growth_T,
        "sum_expm1_2d": lambda: growth_T * (growth_T + 2), "sum_weight": lambda: weight_T,
        "sum_weight2": lambda: weight_T * weight_T,
        "num_outside": lambda: ((d_T < _LOWER) | (d_T > _UPPER)).astype(np.float64),
        "sum_prob_diff": lambda: prob_diff_T, SUM_EXP_ABS_D: lambda: np.exp(np.minimum(size_T, -_TINY)),
    }  # fmt: skip
    sums = {name: np.add.reduceat(term(), starts_B) for name, term in terms.items() if name in asked}
    largest = {"max_abs_d": size_T, "max_prob_diff": prob_diff_T}
    sums |= {name: np.maximum.reduceat(term_T, starts_B) for name, term_T in largest.items() if name in asked}
    return sums | ({"peak_d": peak_B} if "peak_d" in asked else {})


_OF_PROB_DIFF = frozenset(("sum_prob_diff", "max_prob_diff"))
_OF_GROWTH = frozenset(("sum_k3", "sum_expm1_d", "sum_expm1_2d")) | _OF_PROB_DIFF
_OF_WEIGHTS = frozenset(("sum_weight", "sum_weight2"))


def probability_sums(a_T: Array, b_T: Array, starts_B: np.ndarray) -> dict[str, Array]:
    """Return the sums in OF_PROBABILITIES, [B]. To stay precise near 0 and 1, probabilities are taken relative to the
    sequence's largest probability: exp(a) - exp(peak) = exp(peak) expm1(a - peak)."""
    num_B = np.diff(np.append(starts_B, len(a_T))).astype(np.float64)
    sums: dict[str, Array] = {}
    falls: dict[str, Centred] = {}
    scales: dict[str, Array] = {}
    for side, logprob_T in (("a", a_T), ("b", b_T)):
        peak_B = np.maximum.reduceat(logprob_T, starts_B)
        peak_B = np.where(peak_B == -np.inf, 0.0, peak_B)
        fall = centred(np.expm1(logprob_T - repeated(peak_B, starts_B, len(a_T))), starts_B, num_B)
        sums[f"peak_{side}"], sums[f"mean_fall_{side}"] = peak_B, fall.mean_N
        falls[side], scales[side] = fall, np.exp(peak_B)
    for one, other in (("a", "a"), ("b", "b"), ("a", "b")):
        name = f"spread_prob_{one if one == other else one + other}"
        sums[name] = co_moment(falls[one], falls[other], starts_B, num_B) * scales[one] * scales[other]
    return sums


def prob_differences(a_T: Array, b_T: Array, growth_T: Array) -> Array:
    """Return |exp(a) - exp(b)| = exp(b) |exp(d) - 1|, [T], given growth_T = exp(d) - 1.

    >>> a, b = np.array([-1.0, -1.0]), np.array([-1.0 - 2**-40, -3000.0])
    >>> with np.errstate(all="ignore"):
    ...     [float(f"{size:.12g}") for size in prob_differences(a, b, np.expm1(a - b))]
    [3.34584402636e-13, 0.367879441171]
    """
    found = np.exp(b_T) * np.abs(growth_T)
    tiny = np.flatnonzero(b_T < _TINY)
    if len(tiny):
        a, b = a_T[tiny], b_T[tiny]
        size = np.where(a == b, 0.0, np.abs(a - b))
        found[tiny] = np.exp(np.maximum(a, b)) * -np.expm1(-size)
    return np.asarray(found)


def expm1_minus(x: Array, growth: Array) -> Array:
    """Return exp(x) - 1 - x, precise for every x, given growth = exp(x) - 1.

    >>> round(float(expm1_minus(np.array([1e-9]), np.expm1([1e-9]))[0]), 30)
    5.00000000167e-19
    """
    small = np.flatnonzero(np.abs(x) < _SERIES)
    near = x if len(small) == len(x) else x[small]
    series = np.full_like(near, 1 / _FACTORIALS[-1])
    for factorial in _FACTORIALS[-2:0:-1]:
        series *= near
        series += 1 / factorial
    series *= near
    series *= near
    if len(small) == len(x):
        return series
    found = growth - x
    found[small] = series
    return found


def _of_lists(a: Column, b: Column, mask: Column) -> pa.StructArray:
    tokens = finite(tokens_of({"a": a, "b": b}, mask=mask))
    return pa.StructArray.from_arrays(_arrays(tokens), list(_COLUMNS))


def _of_rows(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Sizes]:
    tokens = _finite_of_rows(rows)
    columns = [*(rows.column(name) for name in KEYS), *_arrays(tokens)]
    return pa.RecordBatch.from_arrays(columns, [*KEYS, *_COLUMNS]), sizes_of(rows, tokens)


def _finite_of_rows(rows: pa.RecordBatch) -> FiniteTokens:
    return finite(tokens_of({side: rows.column(f"logprobs_{side}") for side in ("a", "b")}, mask=rows.column("mask")))


def sizes_of(rows: pa.RecordBatch, tokens: FiniteTokens) -> Sizes:
    abs_d_T = np.abs(tokens.a_T.astype(np.float64) - tokens.b_T)
    run_N, step_N = rows.column("run").dictionary_encode(), array_of(rows.column("step"))
    ends_N = np.cumsum(tokens.num_tokens_N)
    changes_N = (np.diff(step_N) != 0) | (np.diff(run_N.indices) != 0)
    lasts: list[int] = [*np.flatnonzero(changes_N).tolist(), len(step_N) - 1] if len(step_N) else []
    found, start = [], 0
    for last in lasts:
        end = int(ends_N[last])
        if end > start:
            found.append((run_N[last].as_py(), int(step_N[last]), abs_d_T[start:end]))
        start = end
    return found


def _arrays(tokens: FiniteTokens) -> list[pa.Array]:
    sums = pair_sums(tokens)
    empty = pa.array(sums["num_tokens"] == 0)
    arrays = {name: pa.array(values).cast(_TYPES[name]) for name, values in sums.items()}
    return [values if name.startswith("num_") else pc.if_else(empty, None, values) for name, values in arrays.items()]
