"""Which steps of a run are looked at: all of a small one, else some, so that what is read stays small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..trace.database import Database
from ..trace.quoting import quoted
from ..trace.sampling import evenly_within, fitting
from ..trace.source import Pair

LOOKED_TOKENS = 4_000_000
"""Response tokens that are looked at in any case."""

KEPT_SHARE = 0.2
"""Share of the run's tokens that is looked at where the trace keeps the pair's sums, so that no token is read to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """Steps, in order."""

    run: str
    steps: tuple[int, ...]
    spread: frozenset[int]
    """Those that were taken evenly over the run; all of them where every step is looked at."""
    notable: tuple[int, ...]
    """Those that were asked for, the most notable first."""
    worst: frozenset[int]
    """Those that the kept sums point at."""
    num_tokens: int
    """Response tokens of `steps`."""
    num_steps: int
    """Of the run, and the next two alike."""
    num_sequences: int
    num_run_tokens: int
    has_all_worst: bool
    """Whether no step that is left out has one of the worst sequences."""

    @property
    def is_all(self) -> bool:
        """Whether every step is looked at."""
        return len(self.steps) == self.num_steps

    def with_worst(self, most: int) -> set[int]:
        """Steps that show their own worst sequences: the notable ones and others evenly spread, at most so many."""
        first = list(self.notable[:most])
        others = [step for step in self.steps if step not in first]
        return {*first, *evenly_within(others, most - len(first))}


def look_at(database: Database, pair: Pair, run: str, notable: Sequence[int], worst: int) -> LookedAt:
    """Choose steps of a run that have response tokens: notable ones, those with the `worst` sequences, and others evenly.

    The worst are known where the trace keeps the pair's sums.
    """
    rows = database.connection.execute(_STEPS, [run]).fetchall()
    tokens = {step: num_tokens for step, _, num_tokens in rows}
    total, by_sums = sum(tokens.values()), pair in database.covered
    most = max(LOOKED_TOKENS, int(total * KEPT_SHARE)) if by_sums else LOOKED_TOKENS
    asked = [step for step in dict.fromkeys(notable) if step in tokens]
    found = _worst(database, pair, run, worst) if by_sums and total > most else []
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
        has_all_worst=total <= most or (by_sums and {*found} <= chosen),
    )  # fmt: skip


_STEPS = """
    SELECT step, count(*), sum(num_response_tokens)::BIGINT
    FROM sequences WHERE run = ? AND num_response_tokens > 0 GROUP BY step ORDER BY step
"""


def _worst(database: Database, pair: Pair, run: str, most: int) -> list[int]:
    """The steps of the sequences with the largest |d|, the worst first."""
    query = f"""
        SELECT step FROM sequence_sums
        WHERE run = {quoted(run)} AND pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])}
          AND iteration_a = 0 AND iteration_b = 0 AND num_tokens > 0
        ORDER BY max_abs_d DESC, sum_abs_d DESC, step, seq_id LIMIT {most}
    """
    return [step for (step,) in dict.fromkeys(database.connection.execute(query).fetchall())]
