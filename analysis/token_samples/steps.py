"""Choose the steps to search for samples, and read the mismatch for the sequences in these steps.

All steps of a small run are searched, but only some steps of a larger run, to limit reading. Shapes: N sequences, ordered by
step and name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.source import Pair
from ..trace.tokens import evenly_within, fitting

LOOKED_TOKENS = 4_000_000
"""Minimum number of response tokens searched; a run with fewer tokens is searched whole."""
SUMMED_SHARE = 0.2
"""Share of the run's tokens searched if the trace stores the pair's sums, in which case the search need not read tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """The steps that are searched, in order."""

    run: str
    steps: tuple[int, ...]
    spread: frozenset[int]
    """Searched steps that are evenly spaced over the run; all steps if every step is searched."""
    notable: tuple[int, ...]
    """Requested steps, most notable first."""
    worst: frozenset[int]
    """Steps that contain the sequences with the largest |d|."""
    num_tokens: int
    """Number of response tokens in `steps`."""
    num_steps: int
    """Number of steps in the whole run; `num_sequences` and `num_run_tokens` also count the whole run."""
    num_sequences: int
    num_run_tokens: int
    has_all_worst: bool
    """True if every one of the worst sequences is in a searched step."""

    @property
    def is_all(self) -> bool:
        """Return True if every step of the run is searched."""
        return len(self.steps) == self.num_steps

    def with_worst(self, most: int) -> set[int]:
        """Return up to `most` steps for which the worst sequences of the step are shown: notable steps first, then evenly
        spaced steps."""
        first = list(self.notable[:most])
        others = [step for step in self.steps if step not in first]
        return {*first, *evenly_within(others, most - len(first))}


def look_at(database: Database, pair: Pair, run: str, notable: Sequence[int], worst: int) -> LookedAt:
    """Choose steps with response tokens: notable steps, the steps of the `worst` sequences if sums are stored, and evenly
    spaced steps."""
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
    """Return the steps that contain the `most` sequences with the largest |d|, worst first."""
    query = f"""
        SELECT step FROM sequence_sums
        WHERE run = {quoted(run)} AND pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])}
          AND iteration_a = 0 AND iteration_b = 0 AND num_tokens > 0
        ORDER BY max_abs_d DESC, sum_abs_d DESC, step, seq_id LIMIT {most}
    """
    return [step for (step,) in dict.fromkeys(database.connection.execute(query).fetchall())]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMismatch:
    """Mismatch of every sequence with response tokens, including sequences without comparable tokens."""

    steps: np.ndarray
    """[N]"""
    seq_ids: list[str]
    """[N]"""
    lengths: np.ndarray
    """[N] number of response tokens."""
    prompt_lengths: np.ndarray
    """[N] number of prompt tokens; 0 if not recorded."""
    num_compared: np.ndarray
    """[N] number of tokens that the loss counts and that have a finite logprob in both passes."""
    sum_abs_d: np.ndarray
    """[N] sum of |d|, nats; 0 if no token is comparable. `max_abs_d` has the same shape and unit."""
    max_abs_d: np.ndarray

    @property
    def mean_abs_d(self) -> np.ndarray:
        """Return the mean |d| of each sequence, [N], nats."""
        return np.asarray(self.sum_abs_d / np.maximum(self.num_compared, 1))


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
    """Read the mismatch for every sequence in the given steps, from the stored sums of the pair if available, else from
    tokens.
    """
    within = f"run = {quoted(run)} AND step IN ({', '.join(map(str, steps)) or 'NULL'})"
    query = _MISMATCH.format(within=within, a=quoted(pair[0]), b=quoted(pair[1]))
    database.connection.use_threads()
    step, seq_id, *numbers = database.connection.sql(query).to_arrow_table().columns
    names = ("lengths", "prompt_lengths", "num_compared", "sum_abs_d", "max_abs_d")
    return SequenceMismatch(
        steps=step.to_numpy(),
        seq_ids=seq_id.to_pylist(),
        **{name: column.to_numpy() for name, column in zip(names, numbers, strict=True)},
    )
