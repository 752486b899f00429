"""Sums over the whole run, not over the sampled tokens alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..trace.database import Database, quoted
from ..trace.lists import mapped
from ..trace.pair_sums import OF_DIFFERENCES, finite_tokens, pair_sums
from ..trace.source import Pair
from ..trace.token_lists import BATCH_ROWS

_COLUMNS = ("num_tokens", *OF_DIFFERENCES)


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


def read_sums(database: Database, pair: Pair) -> Sums:
    """The sums that the trace keeps, or else those of tokens."""
    if pair in database.covered:
        columns = database.connection.execute(_kept(pair)).fetchnumpy()
        return _sums({name: np.asarray(values) for name, values in columns.items()})
    database.connection.execute("RESET threads")
    rows = database.connection.sql(_lists(database, pair)).to_arrow_reader(BATCH_ROWS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(mapped(pool, _of_tokens, rows)) or [_of_tokens(pa.RecordBatch.from_pylist([], rows.schema))]
    return _sums({name: np.concatenate([part[name] for part in found]) for name in found[0]})


def _sums(columns: dict[str, np.ndarray]) -> Sums:
    return Sums(steps=columns.pop("step"), columns=columns)


def _kept(pair: Pair) -> str:
    chosen = ", ".join(f"coalesce({name}, 0) AS {name}" for name in _COLUMNS)
    return (
        f"SELECT step, {chosen} FROM sequence_sums WHERE pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])} "
        "AND iteration_a = 0 AND iteration_b = 0"
    )


def _lists(database: Database, pair: Pair) -> str:
    """Both passes' lists, a sequence a row; no other table is read where no sequence has a mask."""
    masked = database.connection.execute("SELECT count(response_mask) > 0 FROM sequences").fetchall() == [(True,)]
    mask = "coalesce(s.response_mask, []::BOOLEAN[])" if masked else "[]::BOOLEAN[]"
    sequences = "JOIN sequences AS s ON s.run = a.run AND s.step = a.step AND s.seq_id = a.seq_id" if masked else ""
    return f"""
        SELECT a.step, a.logprobs AS a, b.logprobs AS b, {mask} AS mask
        FROM scores AS a
        JOIN scores AS b ON b.run = a.run AND b.step = a.step AND b.seq_id = a.seq_id
        {sequences}
        WHERE a."pass" = {quoted(pair[0])} AND b."pass" = {quoted(pair[1])} AND a.iteration = 0 AND b.iteration = 0
          AND a.logprobs IS NOT NULL AND b.logprobs IS NOT NULL
    """


def _of_tokens(rows: pa.RecordBatch) -> dict[str, np.ndarray]:
    """The step and sums of the tokens with a finite logprob in both passes, by sequence."""
    tokens = finite_tokens(rows.column("a"), rows.column("b"), rows.column("mask"))
    return {"step": rows.column("step").to_numpy(), **pair_sums(tokens, _COLUMNS)}
