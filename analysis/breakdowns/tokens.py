"""The tokens of the chosen sequences as flat arrays, in an order that does not depend on that of the rows.

Shapes: T tokens of N sequences, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...schemas.loss import CURRENT
from ..statistics.estimators import Array
from ..trace.database import Database, quoted
from ..trace.lists import counted, first, flat
from ..trace.source import Pair
from .chosen import KEY, Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Sequences by step; every one has a token."""

    a_T: Array
    """float32 logprob of pass a, nats; NaN where there is none."""
    b_T: Array
    now_T: Array | None
    """Of the pass inside the loss, at its first use; None where it is pass a, or where no advantage was recorded."""
    mask_T: np.ndarray | None
    """bool: whether the loss counts it; None: all of them."""
    entropy_T: Array | None
    """nats; NaN where there is none; None where neither pass recorded any."""
    advantage_T: Array | None
    """NaN where there is none; None where no sequence has one."""
    step_N: np.ndarray
    lengths_N: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What of a run can be read beside the logprobs of a pair."""

    mask: bool
    advantage: bool
    """One for a whole response."""
    advantages: bool
    """One for each token."""
    entropy: bool
    """Of either pass."""
    now: bool
    """The pass inside the loss is a third one, and there are advantages to look at it with."""


def recorded(database: Database, pair: Pair, run: str) -> Recorded:
    """Look which columns have a value; it reads no more than it takes to find one."""

    def holds(table: str, condition: str) -> bool:
        query = f"SELECT step FROM {table} WHERE run = $run AND {condition} LIMIT 1"
        return bool(database.connection.execute(query, {"run": run}).fetchall())

    either = f'"pass" IN ({quoted(pair[0])}, {quoted(pair[1])}, {quoted(CURRENT)}) AND iteration = 0'
    advantage, advantages = (holds("sequences", f"{name} IS NOT NULL") for name in ("advantage", "advantages"))
    scored = f'"pass" = {quoted(CURRENT)} AND iteration = 0 AND logprobs IS NOT NULL'
    return Recorded(
        mask=holds("sequences", "response_mask IS NOT NULL"),
        advantage=advantage,
        advantages=advantages,
        entropy=holds("scores", f"{either} AND entropy IS NOT NULL"),
        now=(advantage or advantages) and CURRENT not in pair and holds("scores", scored),
    )


def read_tokens(database: Database, pair: Pair, chosen: Chosen, has: Recorded) -> Tokens | None:
    """Read them; None where no sequence has a token under both passes."""
    database.connection.execute("RESET threads")
    rows = database.connection.sql(_query(pair, chosen, has)).to_arrow_table()
    return _ordered(_of_rows(rows, has), rows["key"].to_numpy()) if len(rows) else None


def _ordered(tokens: Tokens, key_N: np.ndarray) -> Tokens:
    """Sequences by step and key."""
    order = np.lexsort((key_N, tokens.step_N))
    if (np.diff(order) == 1).all():
        return tokens
    ends_N = np.cumsum(tokens.lengths_N)
    places = list(zip((ends_N - tokens.lengths_N)[order].tolist(), ends_N[order].tolist(), strict=True))

    def arranged(values_T: np.ndarray) -> np.ndarray:
        # Of whole sequences at once: an index of every token takes ten times as long.
        return np.concatenate([values_T[start:end] for start, end in places])

    return Tokens(
        a_T=arranged(tokens.a_T),
        b_T=arranged(tokens.b_T),
        now_T=None if tokens.now_T is None else arranged(tokens.now_T),
        mask_T=None if tokens.mask_T is None else arranged(tokens.mask_T),
        entropy_T=None if tokens.entropy_T is None else arranged(tokens.entropy_T),
        advantage_T=None if tokens.advantage_T is None else arranged(tokens.advantage_T),
        step_N=tokens.step_N[order],
        lengths_N=tokens.lengths_N[order],
    )


def _query(pair: Pair, chosen: Chosen, has: Recorded) -> str:
    columns = [f"a.step, {KEY.format(rows='a')} AS key, a.logprobs AS a, b.logprobs AS b"]
    joins = [_scores("a", pair[0], chosen), "JOIN " + _scores("b", pair[1], chosen) + _on("b")]
    if has.entropy:
        columns.append("coalesce(b.entropy, a.entropy, loss.entropy, []::FLOAT[]) AS entropy")
        joins.append("LEFT JOIN " + _scores("loss", CURRENT, chosen) + _on("loss"))
    if has.now:
        columns.append("coalesce(now.logprobs, []::FLOAT[]) AS now")
        joins.append("LEFT JOIN " + _scores("now", CURRENT, chosen) + _on("now"))
    if has.mask or has.advantage or has.advantages:
        joins.append(f"JOIN (SELECT * FROM sequences WHERE {_within('sequences', chosen)}) AS s" + _on("s"))
    if has.mask:
        columns.append("coalesce(s.response_mask, []::BOOLEAN[]) AS mask")
    if has.advantage:
        columns.append("s.advantage::DOUBLE AS advantage")
    if has.advantages:
        columns.append("coalesce(s.advantages, []::FLOAT[]) AS advantages")
    return f"SELECT {', '.join(columns)} FROM {' '.join(joins)} WHERE len(a.logprobs) > 0 AND len(b.logprobs) > 0"


def _scores(name: str, scored: str, chosen: Chosen) -> str:
    where = f'iteration = 0 AND "pass" = {quoted(scored)} AND {_within("scores", chosen)}'
    return f"(SELECT * FROM scores WHERE {where}) AS {name}"


def _on(name: str) -> str:
    return f" ON {name}.step = a.step AND {name}.seq_id = a.seq_id"


def _within(table: str, chosen: Chosen) -> str:
    within = f"run = {quoted(chosen.run)} AND step IN ({', '.join(str(step) for step in chosen.steps)})"
    if chosen.largest_key is not None:
        within += f" AND {KEY.format(rows=table)} <= {chosen.largest_key}"
    return within


def _of_rows(rows: pa.Table, has: Recorded) -> Tokens:
    lengths_N = np.minimum(flat(rows["a"])[1], flat(rows["b"])[1])
    return Tokens(
        a_T=_fitted(rows["a"], lengths_N),
        b_T=_fitted(rows["b"], lengths_N),
        now_T=_fitted(rows["now"], lengths_N) if has.now else None,
        mask_T=counted(rows["mask"], lengths_N) if has.mask else None,
        entropy_T=_fitted(rows["entropy"], lengths_N) if has.entropy else None,
        advantage_T=_advantages(rows, lengths_N, has),
        step_N=rows["step"].to_numpy(),
        lengths_N=lengths_N,
    )


def _fitted(lists: pa.ChunkedArray, lengths_N: np.ndarray) -> Array:
    """[T] values of lists, cut or filled up with NaN to these lengths."""
    values, own_N = flat(lists)
    found: Array = values.to_numpy(zero_copy_only=False)
    if np.array_equal(own_N, lengths_N):
        return found
    shortest_N = np.minimum(own_N, lengths_N)
    fitted = np.full(int(lengths_N.sum()), np.nan, found.dtype)
    inside, taken = (first(each_N, shortest_N).to_numpy(zero_copy_only=False) for each_N in (lengths_N, own_N))
    fitted[inside] = found[taken]
    return fitted


def _advantages(rows: pa.Table, lengths_N: np.ndarray, has: Recorded) -> Array | None:
    """[T] each token's own, else that of its response."""
    if not has.advantage and not has.advantages:
        return None
    of_response_N = rows["advantage"].to_numpy() if has.advantage else np.full(len(lengths_N), np.nan)
    of_response_T = np.repeat(of_response_N.astype(np.float64), lengths_N)
    if not has.advantages:
        return of_response_T
    own_N = flat(rows["advantages"])[1]
    return np.where(np.repeat(own_N > 0, lengths_N), _fitted(rows["advantages"], lengths_N), of_response_T)
