"""Sums over the whole run, not over the sampled tokens alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.sums import SEQUENCE_SUMS
from ..database import Database, quoted
from ..pairs import quoted_pair
from ..source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums of d and what follows from it, by sequence or by step: see schemas.sums."""

    steps: np.ndarray
    """[R] step of each row."""
    columns: dict[str, np.ndarray]
    """Name of a sum -> [R], 0 where a row has no finite token."""

    @property
    def num_tokens(self) -> int:
        """Tokens with a finite logprob in both passes."""
        return int(self.columns["num_tokens"].sum())

    def mean(self, name: str) -> float:
        """A sum over all tokens, divided by their number."""
        return float(self.columns[name].sum() / max(self.num_tokens, 1))

    def worst_steps(self) -> list[int]:
        """Steps by their mean of d squared, the largest first."""
        steps, place = np.unique(self.steps, return_inverse=True)
        squares = np.bincount(place, self.columns["sum_d2"])
        mean = squares / np.maximum(np.bincount(place, self.columns["num_tokens"]), 1)
        return [int(step) for step in steps[np.argsort(-mean, kind="stable")]]


def read_sums(database: Database, pair: Pair, *, full: bool) -> Sums:
    """The sums that the trace keeps, or else those of tokens: all of them, or the number of tokens and d squared."""
    rows = database.connection.execute(_kept(pair) if pair in database.covered else _of_tokens(database, pair, full))
    columns = {name: np.asarray(values) for name, values in rows.fetchnumpy().items()}
    return Sums(steps=columns.pop("step"), columns=columns)


def _kept(pair: Pair) -> str:
    names = [column.name for column in SEQUENCE_SUMS.columns if column.name.startswith(("num_", "sum_", "max_"))]
    chosen = ", ".join(f"coalesce({name}, 0) AS {name}" for name in names)
    return (
        f"SELECT step, {chosen} FROM sequence_sums WHERE pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])} "
        "AND iteration_a = 0 AND iteration_b = 0"
    )


def _of_tokens(database: Database, pair: Pair, full: bool) -> str:
    masked = database.connection.execute("SELECT count(response_mask) > 0 FROM sequences").fetchall() == [(True,)]
    tokens = f"{'masked' if masked else 'unmasked'}_pair({quoted_pair(pair)})"
    light = "count(*) AS num_tokens, sum(d * d) AS sum_d2"
    if not full:
        return f"SELECT step, {light} FROM {tokens} GROUP BY step"
    return f"""
        SELECT step, {light}, sum(d) AS sum_d, sum(abs(d)) AS sum_abs_d, max(abs(d)) AS max_abs_d, sum(k3) AS sum_k3,
               sum(growth) AS sum_expm1_d, sum(growth * (growth + 2)) AS sum_expm1_2d,
               count(*) FILTER (d < ln(0.8) OR d > ln(1.25)) AS num_outside, sum(prob_b * abs(growth)) AS sum_prob_diff
        FROM (
            SELECT *, d + k3 AS growth, exp(logprob_b) AS prob_b
            FROM (SELECT *, expm1_minus(d) AS k3 FROM {tokens})
        )
        GROUP BY step
    """
