"""Compute each sequence's sums for verl's metrics.

Shapes: T tokens from N sequences, concatenated. A sequence's sums depend only on its own tokens, so
they are bitwise identical for any batching and any number of threads.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ...tracer.arrow_arrays import number_array
from ..statistics.loss import SAFETY_BOUND
from ..statistics.moments import centred, co_moment
from ..trace.macros import struct_sql
from ..trace.pair_sums import KEYS, OF_PROBABILITIES, expm1_minus, prob_differences, probability_sums
from ..trace.ragged import Column, blocks, tokens_of

_SUMS = (
    "sum_old", "sum_rollout", "sum_d", "sum_k3", "sum_expm1_2d", "sum_prob_diff", "max_prob_diff", "mean_prob_diff",
    "spread_prob_diff", *OF_PROBABILITIES,
)  # fmt: skip
"""In the columns OF_PROBABILITIES, pass a is the trainer and pass b the rollout."""

STRUCT = struct_sql({"num_tokens": "BIGINT"} | dict.fromkeys(_SUMS, "DOUBLE"))


def summed(rows: pa.RecordBatch) -> pa.RecordBatch:
    sums = verl_sums(rows.column("old"), rows.column("rollout"), rows.column("mask"))
    names = [*KEYS, *(field.name for field in sums.type)]
    return pa.RecordBatch.from_arrays([*(rows.column(name) for name in KEYS), *sums.flatten()], names)


def token_sums(old_T: np.ndarray, rollout_T: np.ndarray, num_tokens_N: np.ndarray) -> np.ndarray:
    """Return an array [16, N] with the sums over each sequence. NaN and infinities propagate.

    Each sequence must have at least one token.
    """
    found = np.empty((len(_SUMS), len(num_tokens_N)))
    for sequences, tokens, starts in blocks(num_tokens_N):
        with np.errstate(all="ignore"):
            sums = _sums(old_T[tokens].astype(np.float64), rollout_T[tokens].astype(np.float64), starts)
        for place, name in enumerate(_SUMS):
            found[place, sequences] = sums[name]
    return found


def _sums(old_T: np.ndarray, rollout_T: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    d_T = old_T - rollout_T
    growth_T = np.expm1(d_T)
    num = np.diff(np.append(starts, len(d_T))).astype(np.float64)
    diff_T = prob_differences(old_T, rollout_T, growth_T)
    terms = {
        "sum_old": old_T, "sum_rollout": rollout_T, "sum_d": d_T, "sum_k3": expm1_minus(d_T, growth_T),
        "sum_expm1_2d": np.expm1(2 * np.clip(d_T, -SAFETY_BOUND, SAFETY_BOUND)), "sum_prob_diff": diff_T,
    }  # fmt: skip
    diff = centred(diff_T, starts, num)
    return {name: np.add.reduceat(term, starts) for name, term in terms.items()} | {
        "max_prob_diff": np.maximum.reduceat(diff_T, starts), "mean_prob_diff": diff.mean_N,
        "spread_prob_diff": co_moment(diff, diff, starts, num), **probability_sums(old_T, rollout_T, starts),
    }  # fmt: skip


def verl_sums(old: Column, rollout: Column, mask: Column) -> pa.StructArray:
    tokens = tokens_of({"old": old, "rollout": rollout}, mask=mask)
    tokens = tokens.where(tokens.counted_T)
    num_tokens = tokens.lengths_N
    found = np.zeros((len(_SUMS), len(num_tokens)))
    full = num_tokens > 0
    found[:, full] = token_sums(tokens.logprobs["old"], tokens.logprobs["rollout"], num_tokens[full])
    arrays = [number_array(num_tokens, pa.int64()), *(number_array(row, pa.float64()) for row in found)]
    return pa.StructArray.from_arrays(arrays, ["num_tokens", *_SUMS])
