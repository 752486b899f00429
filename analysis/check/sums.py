"""Sums over the whole run, not over the sampled tokens alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...schemas.sums import SEQUENCE_SUMS
from ..database import Database, quoted
from ..lists import mapped
from ..source import Pair
from ..token_lists import BATCH_ROWS, blocks, counted_tokens

_TERMS = (
    "sum_d", "sum_abs_d", "sum_d2", "sum_k3", "max_abs_d", "sum_expm1_d", "sum_expm1_2d", "num_outside", "sum_prob_diff",
)  # fmt: skip
_LOG_OUTSIDE = float(np.log(1.25))
"""|d| beyond which exp(d) is below 0.8 or above 1.25."""


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
    names = [column.name for column in SEQUENCE_SUMS.columns if column.name.startswith(("num_", "sum_", "max_"))]
    chosen = ", ".join(f"coalesce({name}, 0) AS {name}" for name in names)
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
    a_T, b_T, num_counted = counted_tokens(rows.column("a"), rows.column("b"), rows.column("mask"))
    there = np.isfinite(a_T) & np.isfinite(b_T)
    num_tokens = num_counted
    if not there.all():
        seq = np.repeat(np.arange(len(num_counted)), num_counted)
        a_T, b_T, num_tokens = a_T[there], b_T[there], np.bincount(seq[there], minlength=len(num_counted))
    full = num_tokens > 0
    found = {name: np.zeros(len(num_tokens)) for name in _TERMS}
    for sequences, tokens, starts in blocks(num_tokens[full]):
        place = np.flatnonzero(full)[sequences]
        for name, term in _terms(a_T[tokens].astype(np.float64), b_T[tokens].astype(np.float64)).items():
            add = np.maximum if name == "max_abs_d" else np.add
            found[name][place] = add.reduceat(term, starts)
    return {"step": rows.column("step").to_numpy(), "num_tokens": num_tokens, **found}


def _terms(a_T: np.ndarray, b_T: np.ndarray) -> dict[str, np.ndarray]:
    """What each token adds to each of `_TERMS`: see schemas.sums."""
    d_T = a_T - b_T
    size_T = np.abs(d_T)
    with np.errstate(over="ignore", invalid="ignore"):
        growth_T = np.expm1(d_T)  # keeps k3's digits where d is small
        terms = (
            d_T, size_T, d_T * d_T, growth_T - d_T, size_T, growth_T, growth_T * (growth_T + 2),
            (size_T > _LOG_OUTSIDE).astype(np.float64), np.exp(b_T) * np.abs(growth_T),
        )  # fmt: skip
    return dict(zip(_TERMS, terms, strict=True))
