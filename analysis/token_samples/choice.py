"""Choose which steps to search and which sequences to show, and describe the choice.

A small run is searched in full. Shapes: N sequences, ordered by step and name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.ragged import array_of
from ..trace.source import Pair
from ..trace.tokens import evenly_within, fitting

WORST, TYPICAL, RANDOM, WORST_OF_STEP = "worst", "typical", "random", "worst of step"
"""Possible reasons for choosing a sequence."""

PROMPT_TOKENS = 400
"""Maximum number of prompt tokens to show, taken from the end of the prompt."""


LOOKED_TOKENS = 4_000_000
"""Number of response tokens to search in a run. Smaller runs are searched in full."""
SUMMED_SHARE = 0.2
"""Share of response tokens to search (but at least LOOKED_TOKENS tokens) if the trace stores the pair's sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    run: str
    steps: tuple[int, ...]
    spread: frozenset[int]
    notable: tuple[int, ...]
    worst: frozenset[int]
    """Steps that were added because they contain sequences with the largest |d|."""
    num_tokens: int
    num_steps: int
    num_sequences: int
    num_run_tokens: int
    has_all_worst: bool

    @property
    def is_all(self) -> bool:
        return len(self.steps) == self.num_steps


def look_at(database: Database, pair: Pair, run: str, notable: Sequence[int], worst: int) -> LookedAt:
    rows = database.connection.execute(_STEPS, [run]).fetchall()
    tokens = {step: num_tokens for step, _, num_tokens in rows}
    total, has_sums = sum(tokens.values()), database.sums.covers(pair)
    most = max(LOOKED_TOKENS, int(total * SUMMED_SHARE)) if has_sums else LOOKED_TOKENS
    asked = [step for step in dict.fromkeys(notable) if step in tokens]
    found = _worst(database, pair, run, worst) if has_sums and total > most else []
    chosen = {*tokens}
    spread, named = chosen, set[int]()
    if total > most:
        named = fitting([*asked, *found], tokens, most * 3 // 4)
        left = most - sum(tokens[step] for step in named)
        others = [step for step in tokens if step not in named]
        spread = {*evenly_within(others, max(1, int(left * len(tokens) / total)))}
        chosen = named | spread
    return LookedAt(
        run=run, steps=tuple(sorted(chosen)), spread=frozenset(spread),
        notable=tuple(step for step in asked if step in chosen), worst=frozenset(named - {*asked}),
        num_tokens=sum(tokens[step] for step in chosen), num_steps=len(tokens),
        num_sequences=sum(num for _, num, _ in rows), num_run_tokens=total,
        has_all_worst=total <= most or (has_sums and {*found} <= chosen),
    )  # fmt: skip


_STEPS = """
    SELECT step, count(*), sum(num_response_tokens)::BIGINT
    FROM sequences WHERE run = ? AND num_response_tokens > 0 GROUP BY step ORDER BY step
"""


def _worst(database: Database, pair: Pair, run: str, most: int) -> list[int]:
    query = f"""
        SELECT step FROM sequence_sums
        WHERE run = {quoted(run)} AND pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])}
          AND iteration_a = 0 AND iteration_b = 0 AND num_tokens > 0
        ORDER BY max_abs_d DESC, sum_abs_d DESC, step, seq_id LIMIT {most}
    """
    return [step for (step,) in dict.fromkeys(database.connection.execute(query).fetchall())]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMismatch:
    """Mismatch for every sequence with response tokens, comparable or not. Fields have shape [N]."""

    steps: np.ndarray
    seq_ids: list[str]
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    num_compared: np.ndarray
    sum_abs_d: np.ndarray
    """`sum_abs_d` and `max_abs_d` are in nats, or 0 if no token can be compared."""
    max_abs_d: np.ndarray


_MISMATCH = """
    SELECT s.step, s.seq_id, num_response_tokens::BIGINT, coalesce(num_prompt_tokens, 0)::BIGINT,
           coalesce(num_tokens, 0)::BIGINT, coalesce(sum_abs_d, 0)::DOUBLE, coalesce(max_abs_d, 0)::DOUBLE
    FROM (SELECT * FROM sequences WHERE {within} AND num_response_tokens > 0) AS s
    LEFT JOIN (
        SELECT step, seq_id, num_tokens, sum_abs_d, max_abs_d FROM pair_sums({a}, {b})
        WHERE {within} AND iteration_a = 0 AND iteration_b = 0
    ) AS kept ON kept.step = s.step AND kept.seq_id = s.seq_id
    ORDER BY s.step, s.seq_id
"""


def read_sequence_mismatch(database: Database, pair: Pair, run: str, steps: Sequence[int]) -> SequenceMismatch:
    within = f"run = {quoted(run)} AND step IN ({', '.join(map(str, steps)) or 'NULL'})"
    query = _MISMATCH.format(within=within, a=quoted(pair[0]), b=quoted(pair[1]))
    database.connection.use_threads()
    step, seq_id, *numbers = database.connection.sql(query).to_arrow_table().columns
    names = ("lengths", "prompt_lengths", "num_compared", "sum_abs_d", "max_abs_d")
    return SequenceMismatch(
        steps=array_of(step),
        seq_ids=seq_id.to_pylist(),
        **{name: array_of(column) for name, column in zip(names, numbers, strict=True)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    worst: int = 24
    random: int = 16
    typical: int = 8
    max_steps: int = 200
    max_tokens: int = 200_000
    max_sequence_tokens: int = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    why: dict[int, tuple[str, ...]]
    """Reasons for choosing each sequence, by its index in SequenceMismatch."""
    num_left_out: Counter[str]


def choose(gaps: SequenceMismatch, looked: LookedAt, wanted: Wanted) -> Choice:
    compared = np.flatnonzero(gaps.num_compared > 0)
    evenly = np.isin(gaps.steps, [*looked.spread])
    worst = compared[np.lexsort((-gaps.sum_abs_d[compared], -gaps.max_abs_d[compared]))]
    why: dict[int, list[str]] = {}
    for reason, rows in (
        (WORST, worst[: wanted.worst]),
        (TYPICAL, _typical(gaps, compared[evenly[compared]])[: wanted.typical]),
        (RANDOM, _random(gaps, np.flatnonzero(evenly), wanted.random)),
        (WORST_OF_STEP, _of_steps(gaps, worst, looked, wanted)),
    ):
        for row in rows:
            why.setdefault(int(row), []).append(reason)
    kept, left_out, used = dict[int, tuple[str, ...]](), Counter[str](), 0
    for row, reasons in why.items():
        shown = min(int(gaps.lengths[row]), wanted.max_sequence_tokens)
        shown += min(int(gaps.prompt_lengths[row]), PROMPT_TOKENS)
        if used + shown > wanted.max_tokens:
            left_out[reasons[0]] += 1
            continue
        used += shown
        kept[row] = tuple(reasons)
    return Choice(why=kept, num_left_out=left_out)


def _typical(gaps: SequenceMismatch, rows: np.ndarray) -> np.ndarray:
    mean = gaps.sum_abs_d[rows] / np.maximum(gaps.num_compared[rows], 1)
    return rows[np.argsort(np.abs(mean - np.median(mean)), kind="stable")] if len(rows) else rows


def _random(gaps: SequenceMismatch, rows: np.ndarray, num: int) -> Iterable[int]:
    names = (f"{gaps.steps[row]} {gaps.seq_ids[row]}" for row in rows)
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names]
    return [int(rows[place]) for place in sorted(range(len(rows)), key=digests.__getitem__)[:num]]


def _of_steps(gaps: SequenceMismatch, worst: np.ndarray, looked: LookedAt, wanted: Wanted) -> list[int]:
    first: dict[int, int] = {}
    for row in worst:
        first.setdefault(int(gaps.steps[row]), int(row))
    notable = looked.notable[: wanted.max_steps]
    others = [step for step in looked.steps if step not in notable]
    shown = {*notable, *evenly_within(others, wanted.max_steps - len(notable))}
    return [first[step] for step in dict.fromkeys((*looked.notable, *looked.steps)) if step in shown and step in first]


def choice_text(
    choice: Choice, gaps: SequenceMismatch, looked: LookedAt, wanted: Wanted, pair: Pair, lacking: tuple[str, ...]
) -> str:
    if not looked.num_sequences:
        return f"Run {looked.run}: no sequences with response tokens."
    counts = Counter(reason for reasons in choice.why.values() for reason in reasons)
    searched, evenly = ("all steps",) * 2 if looked.is_all else ("the searched steps", "the evenly spaced steps")
    if lacking:
        which = " and ".join(repr(name) for name in lacking)
        basis = f"Pass {which} has no logprobs, so d is unknown and sequences are chosen at random."
    elif not (gaps.num_compared > 0).any():
        basis = f"No token has a logprob in both {pair[0]!r} and {pair[1]!r}, so sequences are chosen at random."
    else:
        counted = "tokens that count toward the loss and have a logprob in both passes"
        basis = f"d = {pair[0]} - {pair[1]}, nats, over {counted}."
    sorts = {
        WORST: f"largest single-token |d| in {'all steps' if looked.has_all_worst else searched}",
        TYPICAL: f"mean |d| closest to the median of the sequences in {evenly}",
        RANDOM: f"picked by hash from {evenly}",
        WORST_OF_STEP: f"1 per step with the largest single-token |d|, in up to {wanted.max_steps:,} steps",
    }
    sentences = [_looked(looked, gaps), basis]
    sentences += [f"{counts[name]:,} {name}: {what}." for name, what in sorts.items() if counts[name]]
    if not choice.why:
        sentences.append("No sequences are shown.")
    if choice.num_left_out:
        parts = ", ".join(f"{num:,} {reason}" for reason, num in choice.num_left_out.items())
        sentences.append(
            f"Omitted to stay within {wanted.max_tokens:,} shown tokens: {parts} "
            "(each sequence is counted once, by the first reason)."
        )
    return " ".join(sentences)


def _looked(looked: LookedAt, gaps: SequenceMismatch) -> str:
    whole = f"{looked.num_steps:,} steps, {looked.num_sequences:,} sequences, {looked.num_run_tokens:,} response tokens"
    if looked.is_all:
        return f"Run {looked.run}: {whole}, all searched."
    parts = {
        "notable": len(looked.notable),
        "with the largest |d|": len(looked.worst),
        "evenly spaced": len(looked.steps) - len(looked.notable) - len(looked.worst),
    }
    return (
        f"Run {looked.run}: {whole}; searched {len(looked.steps):,} steps with {len(gaps.seq_ids):,} sequences and "
        f"{looked.num_tokens:,} response tokens ({', '.join(f'{num:,} {what}' for what, num in parts.items() if num)})."
    )
