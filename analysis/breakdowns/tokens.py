"""Choose the steps and sequences of a run to read, and read their tokens in an order independent of the stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.loss import CURRENT
from ..trace.columns import passes_with, sequence_columns
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.ragged import Tokens
from ..trace.source import Pair
from ..trace.tokens import PassRows, notable_first, token_query, tokens_by_step, tokens_of_rows

KEY = "md5_number_lower({rows}step::VARCHAR || ' ' || {rows}seq_id)"
"""SQL hash of a sequence, used for sampling; `rows` is either empty or a table name followed by a dot."""

_STEPS = """
SELECT step FROM scores WHERE run = $run AND iteration = 0 AND "pass" IN ({a}, {b})
GROUP BY step HAVING count(DISTINCT "pass") = {num} ORDER BY step
"""

_SEQUENCES = """
SELECT {key} AS key, s.num_response_tokens
FROM sequences AS s
SEMI JOIN {a} AS a ON a.step = s.step AND a.seq_id = s.seq_id
SEMI JOIN {b} AS b ON b.step = s.step AND b.seq_id = s.seq_id
WHERE s.run = $run AND s.step IN ({steps})
ORDER BY key
"""

_SCORED = (
    '(SELECT step, seq_id FROM scores WHERE run = $run AND step IN ({steps}) AND iteration = 0 AND "pass" = {name})'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The steps and sequences of a run that are to be read."""

    run: str
    steps: tuple[int, ...]
    largest_key: int | None
    """Largest KEY among the sequences to read; None means that all sequences are read."""
    num_recorded_tokens: int
    """Number of response tokens in the whole run."""
    how: str
    """Phrase that describes which steps and sequences were chosen."""


def choose(
    database: Database, pair: Pair, run: str, *, notable: Sequence[int], max_steps: int, max_tokens: int
) -> Chosen:
    """Choose steps scored under both passes, and a sample of their sequences with at most `max_tokens` tokens in
    total."""
    tokens = tokens_by_step(database, run)
    query = _STEPS.format(a=quoted(pair[0]), b=quoted(pair[1]), num=len(set(pair)))
    known = [step for (step,) in database.connection.execute(query, {"run": run}).fetchall()]
    steps, how = _steps(known, notable, max_steps)
    largest = None
    if sum(tokens.get(step, 0) for step in steps) > max_tokens:
        largest, more = _sequences(database, pair, run, steps, max_tokens)
        how += more
    return Chosen(run=run, steps=steps, largest_key=largest, num_recorded_tokens=sum(tokens.values()), how=how)


def _steps(known: list[int], notable: Sequence[int], max_steps: int) -> tuple[tuple[int, ...], str]:
    if len(known) <= max_steps:
        return tuple(known), f"all {len(known):,} steps scored by both passes" if len(
            known
        ) != 1 else "the one step scored by both passes"
    named, spread = notable_first(known, notable, max_steps)
    parts = [f"{len(named):,} notable ones"] * bool(named) + [f"{len(spread):,} evenly spread"] * bool(spread)
    how = f"{len(named) + len(spread):,} of the {len(known):,} steps scored by both passes, {' and '.join(parts)}"
    return tuple(sorted([*named, *spread])), how


def _sequences(
    database: Database, pair: Pair, run: str, steps: tuple[int, ...], max_tokens: int
) -> tuple[int | None, str]:
    """Return the largest KEY up to which the sequences have at most `max_tokens` tokens (at least one sequence), and a
    phrase that describes the choice."""
    names = ", ".join(str(step) for step in steps)
    a, b = (_SCORED.format(steps=names, name=quoted(name)) for name in pair)
    query = _SEQUENCES.format(key=KEY.format(rows="s."), a=a, b=b, steps=names)
    rows = database.connection.sql(query, params={"run": run}).to_arrow_table()
    total = np.cumsum(rows["num_response_tokens"].to_numpy().astype(np.int64))
    num = max(int(np.searchsorted(total, max_tokens, "right")), 1)
    if num >= len(total):
        return None, ""
    return rows["key"][num - 1].as_py(), (
        f"; {num:,} of their {len(total):,} sequences, those with the lowest hash of step and seq_id, to read at most "
        f"{max_tokens:,} tokens"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """Tokens of the chosen sequences, sorted by step; every sequence has at least one token."""

    tokens: Tokens
    """Logprobs under the passes `a` and `b`, and under `now`, which is the pass inside the loss at its first use. `now`
    is read only if it is a third pass and there are advantages."""
    step_N: np.ndarray

    @property
    def has_now(self) -> bool:
        """True if logprobs of the pass inside the loss were read separately."""
        return "now" in self.tokens.logprobs

    @property
    def has_advantage(self) -> bool:
        """True if any sequence in the run has an advantage."""
        return self.tokens.advantage_N is not None or self.tokens.advantage_T is not None


def read_chosen_tokens(database: Database, pair: Pair, chosen: Chosen) -> ChosenTokens | None:
    """Read the tokens of the chosen sequences; return None if no sequence has a token in both passes."""
    has, run = sequence_columns(database, chosen.run), chosen.run
    lists = [name for name in ("mask", "advantage", "advantages") if getattr(has, name)]
    passes = {"a": PassRows(name=pair[0]), "b": PassRows(name=pair[1])}
    entropy, now = [], []
    if passes_with(database, "entropy", run, of=(*pair, CURRENT), first_use=True):
        entropy = ["b", "a", "loss"]
        passes["loss"] = PassRows(name=CURRENT, scored=False, optional=True, logprobs=False)
    if (has.advantage or has.advantages) and CURRENT not in pair:
        now = ["now"] if passes_with(database, "logprobs", run, of=[CURRENT], first_use=True) else []
        passes |= {name: PassRows(name=CURRENT, optional=True) for name in now}
    query = token_query(
        passes, ["a.step", f"{KEY.format(rows='a.')} AS key"], run=run, steps=chosen.steps, lists=lists, entropy=entropy,
        keys="" if chosen.largest_key is None else f"{KEY.format(rows='')} <= {chosen.largest_key}",
        where="len(a.logprobs) > 0 AND len(b.logprobs) > 0",
    )  # fmt: skip
    database.connection.use_threads()
    rows = database.connection.sql(query).to_arrow_table()
    if not len(rows):
        return None
    step_N, key_N = rows["step"].to_numpy(), rows["key"].to_numpy()
    order_N = np.lexsort((key_N, step_N))
    tokens = tokens_of_rows(rows, ("a", "b"), optional=now)
    return ChosenTokens(tokens=tokens.arranged(order_N), step_N=step_N[order_N])
