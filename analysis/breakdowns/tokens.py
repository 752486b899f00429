"""The tokens of the chosen sequences, in an order that does not depend on that of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.loss import CURRENT
from ..trace.columns import passes_with, sequence_columns
from ..trace.database import Database
from ..trace.ragged import Tokens
from ..trace.source import Pair
from ..trace.tokens import PassRows, token_query, tokens_of_rows
from .chosen import KEY, Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """Sequences by step; every one has a token."""

    tokens: Tokens
    """Logprobs of pass `a`, of `b`, and of `now`, the pass inside the loss, at its first use: where it is a third one, and
    there are advantages to look at it with."""
    step_N: np.ndarray

    @property
    def has_now(self) -> bool:
        """Whether the pass inside the loss was read."""
        return "now" in self.tokens.logprobs

    @property
    def has_advantage(self) -> bool:
        """Whether a sequence of the run has an advantage."""
        return self.tokens.advantage_N is not None or self.tokens.advantage_T is not None


def read_chosen_tokens(database: Database, pair: Pair, chosen: Chosen) -> ChosenTokens | None:
    """Read them; None where no sequence has a token under both passes."""
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
