"""Compute statistics over the captured distributions of two passes, by run, step or sequence."""

from __future__ import annotations

from ..rows import Rows
from ..trace.database import Database
from ..trace.macros import quoted_pair
from ..trace.source import Pair

BY = {"run": "pair_distribution_runs", "step": "pair_distribution_steps", "sequence": "pair_distribution_sequences"}

_DIVERGENCES = ("tv", "js", "kl_ab", "kl_ba")


def has_captured(database: Database, pair: Pair) -> bool:
    """Return True if any sequence has captured distributions from both passes; the distributions themselves are not
    read."""
    query = f"SELECT num_captured FROM num_captured({quoted_pair(pair)})"
    rows = database.connection.execute(query).fetchall()
    return bool(rows and rows[0][0])


def summary(database: Database, pair: Pair, by: str) -> Rows:
    """Return the statistics of a pair of passes: exact columns if all tokens have exact measures, otherwise bounds."""
    rows = database.ask(f"SELECT * FROM {BY[by]}({quoted_pair(pair)})")
    is_exact = all(row["mean_tv"] is not None for row in rows.dicts())
    ends = {f"{kind}_{name}_{end}" for name in _DIVERGENCES for kind in ("mean", "max") for end in ("low", "high")}
    exact = {f"{kind}_{name}" for name in _DIVERGENCES for kind in ("mean", "max")}
    hidden = ends if is_exact else exact | {"num_unsupported_ab", "num_unsupported_ba"}
    return rows.without(hidden)
