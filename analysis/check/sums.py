"""Sums over all tokens in a run, including those that are not inspected individually."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..trace.columns import sequence_columns
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.pair_sums import OF_DIFFERENCES, finite, pair_sums
from ..trace.ragged import counted
from ..trace.source import Pair
from ..trace.sums import ensure
from ..trace.tokens import PassRows, token_query, tokens_by_step, tokens_of_rows

LOST = ("num_nan", "num_inf")
_COLUMNS = ("num_tokens", *LOST, *OF_DIFFERENCES)
_OF_VERDICT = ("num_tokens", *LOST, "sum_d2")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSums:
    """Sums of d and of quantities derived from d, per sequence, per step or over the run; see schemas.sums.

    Shapes: R rows, one per sequence or step, or a single one for the run.
    """

    steps: np.ndarray
    """[R] step that each row belongs to."""
    columns: dict[str, np.ndarray]
    """Name of a sum -> [R] values; 0 for rows without a finite logprob in both passes."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens with a finite logprob in both passes."""
        return int(self.columns["num_tokens"].sum())

    def mean(self, name: str) -> float:
        """Return a sum over all rows divided by the number of tokens. The result does not depend on the order of
        rows."""
        return float(np.sort(self.columns[name]).sum() / max(self.num_tokens, 1))

    @property
    def total(self) -> PairSums:
        """Token counts and the sum of d^2 over the whole run, as one row with step 0."""
        columns = {name: np.asarray([np.sort(self.columns[name]).sum()]) for name in _OF_VERDICT}
        return PairSums(steps=np.zeros(1, np.int64), columns=columns)

    @property
    def num_not_finite(self) -> int:
        """Number of tokens whose logprob is NaN or infinite in either pass."""
        return int(sum(self.columns[name].sum() for name in LOST))

    def worst_lost_steps(self) -> list[int]:
        """Return the steps with non-finite or missing logprobs, in descending order of their number."""
        steps, place = np.unique(self.steps, return_inverse=True)
        lost = np.bincount(place, sum(self.columns[name] for name in (*LOST, "num_null")))
        return [int(step) for step in steps[np.argsort(-lost, kind="stable")] if lost[steps == step][0] > 0]

    def worst_steps(self) -> list[int]:
        """Return the steps in descending order of mean squared d."""
        steps, place = np.unique(self.steps, return_inverse=True)
        squares = np.bincount(place, self.columns["sum_d2"])
        mean = squares / np.maximum(np.bincount(place, self.columns["num_tokens"]), 1)
        return [int(step) for step in steps[np.argsort(-mean, kind="stable")]]


def read_pair_sums(database: Database, pair: Pair) -> PairSums:
    """Return the sums stored in the trace, or compute them from the tokens. On a cluster, the computed sums are stored
    first."""
    if database.ray is not None:
        ensure(database, pair, of_run=False, progress=database.progress)
    if database.sums.covers(pair):
        kept = database.connection.execute(_kept(pair, has_mask=sequence_columns(database).mask)).fetchnumpy()
        columns = {name: np.asarray(values) for name, values in kept.items()}
    else:
        # Without a mask no other table needs to be read.
        query = token_query(
            {"a": PassRows(name=pair[0]), "b": PassRows(name=pair[1])}, ["a.step"],
            lists=["mask"] if sequence_columns(database).mask else [],
        )  # fmt: skip
        parts = []
        with database.progress("reading tokens", sum(tokens_by_step(database).values())) as advance:
            for num_read, part in database.connection.mapped_batches(query, _of_tokens):
                advance(num_read)
                parts.append(part)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return PairSums(steps=columns.pop("step"), columns=columns)


def _kept(pair: Pair, *, has_mask: bool) -> str:
    chosen = ", ".join(f"coalesce(sums.{name}, 0) AS {name}" for name in _COLUMNS)
    counted = "list_sum(response_mask::INTEGER[])" if has_mask else "NULL"
    finite_or_not = " - ".join(f"coalesce(sums.{name}, 0)" for name in ("num_tokens", *LOST))
    return (
        f"SELECT step, {chosen}, greatest(coalesce({counted}, num_response_tokens) - {finite_or_not}, 0) AS num_null "
        f"FROM sequence_sums AS sums JOIN sequences USING (run, step, seq_id) WHERE pass_a = {quoted(pair[0])} "
        f"AND pass_b = {quoted(pair[1])} AND iteration_a = 0 AND iteration_b = 0"
    )


def _of_tokens(rows: pa.RecordBatch) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of tokens, and for each sequence its step and its sums over the tokens with finite logprobs in
    both passes."""
    tokens = tokens_of_rows(rows, ("a", "b"))
    sums = pair_sums(finite(tokens), _COLUMNS)
    mask_T = counted(rows.column("mask"), tokens.lengths_N) if "mask" in rows.schema.names else None
    counted_N = tokens.lengths_N if mask_T is None else np.bincount(tokens.sequence_T, mask_T, len(tokens.lengths_N))
    sums["num_null"] = counted_N - sum(sums[name] for name in ("num_tokens", *LOST))
    return int(tokens.lengths_N.sum()), {"step": rows.column("step").to_numpy(), **sums}
