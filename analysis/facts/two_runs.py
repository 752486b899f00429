"""Pair the sequences of two runs, and find the pairs that differ. `compare` lists these, `attribute` judges the first.

Shapes: N sequences in run A, M in run B, K pairs, S steps with sequences in both runs, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...tracer.arrow_arrays import number_array
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.ragged import array_of, first, fitted, flat
from ..trace.table_views import step_condition
from .rollouts import Rollouts, value_differences

_ROWS = """
SELECT step, hash(prompt_ids) AS prompt, hash(prompt_ids, response_ids) AS whole, response_ids{columns}
FROM (SELECT *, row_number() OVER () AS place FROM sequences WHERE {within}) AS s
{joins}
ORDER BY step, place
"""


@dataclass(frozen=True, slots=True)
class Pairs:
    a: np.ndarray
    b: np.ndarray
    equal: np.ndarray
    """[K] True if prompt and response are identical, False if only the prompt is."""


class Keys(NamedTuple):
    step: np.ndarray
    prompt: np.ndarray
    """[N] hash of each prompt."""
    whole: np.ndarray
    """[N] hash of each prompt and response."""


def paired(a: Keys | Rollouts, b: Keys | Rollouts) -> Pairs:
    """Pair the sequences of two runs within each step, in recording order.

    Identical sequences are paired first, then the remaining sequences with the same prompt.
    """
    of_whole = _matched(a.step, a.whole, b.step, b.whole)
    left_a, left_b = (np.setdiff1d(np.arange(len(run.step)), used) for run, used in zip((a, b), of_whole, strict=True))
    rest = _matched(a.step[left_a], a.prompt[left_a], b.step[left_b], b.prompt[left_b])
    at_a, at_b = np.concatenate([of_whole[0], left_a[rest[0]]]), np.concatenate([of_whole[1], left_b[rest[1]]])
    equal = np.arange(len(at_a)) < len(of_whole[0])
    order = np.argsort(at_a)
    return Pairs(at_a[order], at_b[order], equal[order])


def _matched(
    step_N: np.ndarray, key_N: np.ndarray, step_M: np.ndarray, key_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    keys, key = np.unique(np.concatenate([key_N, key_M]), return_inverse=True)
    _, number = np.unique(np.concatenate([step_N, step_M]), return_inverse=True)
    of_runs = np.split(number * len(keys) + key, [len(key_N)])
    counted = [_numbered(part) for part in of_runs]
    most = 1 + max(int(part.max(initial=0)) for part in counted)
    of_a, of_b = (part * most + place for part, place in zip(of_runs, counted, strict=True))
    _, at_a, at_b = np.intersect1d(of_a, of_b, assume_unique=True, return_indices=True)
    return at_a, at_b


def _numbered(kind_N: np.ndarray) -> np.ndarray:
    order = np.argsort(kind_N, kind="stable")
    number_N = np.empty(len(kind_N), np.int64)
    number_N[order] = np.arange(len(kind_N)) - np.searchsorted(kind_N[order], kind_N[order])
    return number_N


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDifferences:
    """Paired sequences of two runs, sorted by step, and those that differ."""

    pairs: Pairs
    step_K: np.ndarray
    steps_S: np.ndarray
    share_S: np.ndarray
    """Share of the step's prompts that both runs have, 1 if their prompts are identical."""
    rewards_K: np.ndarray
    """True if identical responses have different rewards, or if only one of them has a reward. Always False if a run
    recorded no reward."""
    is_alike_K: np.ndarray
    """True if all responses and rewards of the group are identical in both runs."""
    advantages_K: np.ndarray
    """True if the group is alike, but the advantages differ."""


def row_differences(a: Rollouts, b: Rollouts) -> RowDifferences:
    pairs, steps_S = paired(a, b), np.intersect1d(a.step, b.step)
    step_K = a.step[pairs.a]
    num_S, of_a_S, of_b_S = (
        np.searchsorted(step, steps_S, "right") - np.searchsorted(step, steps_S) for step in (step_K, a.step, b.step)
    )
    one, two = a.reward[pairs.a], b.reward[pairs.b]
    differs = np.zeros(len(one), bool)
    if np.isfinite(a.reward).any() and np.isfinite(b.reward).any():
        of_b, first = np.unique(b.step, return_index=True)
        largest = np.fmax.reduceat(np.abs(b.reward), first)[np.searchsorted(of_b, step_K)]
        differs = value_differences(one, two, largest)[1] | (np.isnan(one) != np.isnan(two))
    is_alike = np.ones(len(one), bool)
    for run, at in ((a, pairs.a), (b, pairs.b)):
        is_same = np.zeros(len(run.step), bool)
        is_same[at[pairs.equal & ~differs]] = True
        is_alike &= ~np.isin(run.group[at], run.group[~is_same])
    one, two = a.advantage[pairs.a], b.advantage[pairs.b]
    return RowDifferences(
        pairs=pairs, step_K=step_K, steps_S=steps_S, share_S=num_S / np.maximum(of_a_S, of_b_S),
        rewards_K=pairs.equal & differs, is_alike_K=is_alike,
        advantages_K=is_alike & value_differences(one, two, np.abs(two))[1],
    )  # fmt: skip


def values_differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return True where logged values differ by more than the float32 rounding of a logger."""
    return np.asarray(np.abs(a - b) > 1e-5 * np.maximum(np.abs(a), np.abs(b)))


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Paired sequences of two runs, up to the first token that differs."""

    a: pa.Table
    b: pa.Table
    """[K] rows with `step`, `response_ids`, the extra columns, and one list of logprobs per pass."""
    passes: Sequence[str]
    equal_K: np.ndarray
    lengths_K: tuple[np.ndarray, np.ndarray]
    num_K: np.ndarray

    def logprobs(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each pair, the number of tokens scored by both runs, [K], and their logprobs in A and B, [T]."""
        lists = [rows[f"p{self.passes.index(name)}"] for rows in (self.a, self.b)]
        num_K = np.where(np.all([flat(each)[1] >= self.num_K for each in lists], axis=0), self.num_K, 0)
        a_T, b_T = (fitted(each, num_K) for each in lists)
        return num_K, a_T, b_T


def read_prefixes(a: Database, b: Database, steps: range, passes: Sequence[str], columns: str = "") -> Prefixes:
    tables = [_read(database, steps, passes, columns) for database in (a, b)]
    keys_a, keys_b = (Keys(*(array_of(rows[name]) for name in ("step", "prompt", "whole"))) for rows in tables)
    pairs = paired(keys_a, keys_b)
    one, two = (rows.take(number_array(at, pa.int64())) for rows, at in zip(tables, (pairs.a, pairs.b), strict=True))
    (ids_a, length_a), (ids_b, length_b) = (flat(rows["response_ids"]) for rows in (one, two))
    num_K = np.minimum(length_a, length_b)
    tokens = [array_of(ids)[first(length, num_K)] for ids, length in ((ids_a, length_a), (ids_b, length_b))]
    differs = np.flatnonzero(tokens[0] != tokens[1])
    ends_K = np.cumsum(num_K)
    rows, place = np.unique(np.searchsorted(ends_K, differs, side="right"), return_index=True)
    num_K[rows] = differs[place] - (ends_K - num_K)[rows]
    return Prefixes(one, two, passes, pairs.equal, (length_a, length_b), num_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTokens:
    apart: dict[str, float]
    """Mean |difference| between the two runs' logprobs (nats), for each pass that both runs recorded."""
    num_cut: int
    num_in_tool: int
    """Number of responses that first differ at a token outside the loss mask, which the policy did not sample."""


def shared_tokens(a: Database, b: Database, step: int, passes: Sequence[str]) -> SharedTokens:
    found = read_prefixes(a, b, range(step, step + 1), passes, columns=", response_mask")
    length_a, length_b = found.lengths_K
    apart = {}
    for name in passes:
        num_K, a_T, b_T = found.logprobs(name)
        apart_T = np.abs(a_T.astype(np.float64) - b_T)
        total = 0.0
        for part in np.split(apart_T, np.cumsum(num_K)[:-1]):
            total += float(part[np.isfinite(part)].sum())
        if count := int(np.isfinite(apart_T).sum()):
            apart[name] = total / count
    is_cut = ~found.equal_K & (found.num_K == length_a) & (length_a < length_b)
    flags, length_K = flat(found.a["response_mask"])
    diverges = (found.num_K < np.minimum(length_a, length_b)) & (length_K > found.num_K)
    places = (np.cumsum(length_K) - length_K + found.num_K)[diverges]
    is_in_tool = ~array_of(flags.fill_null(False))[places]
    return SharedTokens(apart=apart, num_cut=int(is_cut.sum()), num_in_tool=int(is_in_tool.sum()))


def _read(database: Database, steps: range, passes: Sequence[str], columns: str) -> pa.Table:
    within = step_condition(steps)
    query = _ROWS.format(
        columns=columns + "".join(f", p{number}.logprobs AS p{number}" for number in range(len(passes))),
        within=within,
        joins="\n".join(
            f'LEFT JOIN (SELECT step, seq_id, logprobs FROM scores WHERE {within} AND "pass" = {quoted(name)} '
            f"AND iteration = 0) AS p{number} USING (step, seq_id)"
            for number, name in enumerate(passes)
        ),
    )
    return database.connection.sql(query).to_arrow_table().combine_chunks()
