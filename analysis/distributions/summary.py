"""Statistics of the distributions that two passes captured, by run, step or sequence."""

from __future__ import annotations

from ...schemas.errors import InvalidOption, NothingToCompare
from ..rows import Rows
from ..trace.database import Database, Traces
from ..trace.pairs import parse_pair
from ..trace.quoting import quoted_pair
from ..trace.source import Pair

BY = {"run": "pair_distribution_runs", "step": "pair_distribution_steps", "sequence": "pair_distribution_sequences"}

_DIVERGENCES = ("tv", "js", "kl_ab", "kl_ba")


def distributions(traces: Traces, *, pair: str = "train:rollout", by: str = "run") -> Rows:
    """Compare the distributions that two passes captured, in one row a run, step or sequence.

    The columns are those of the SQL macros `pair_distribution_runs`, `_steps` and `_sequences`. Raises NothingToCompare
    when there is no sequence of which both passes captured distributions, TraceNotFound, NewerTrace or DamagedTrace.
    """
    if by not in BY:
        raise InvalidOption(f"got {by!r}; use {', '.join(BY)}", option="by")
    database, names = Database(traces), parse_pair(pair)
    if not has_captured(database, names):
        raise NothingToCompare(_how_to_capture(database, names))
    return summary(database, names, by)


def has_captured(database: Database, pair: Pair) -> bool:
    """Whether some sequence has distributions of both passes; none is read for the answer."""
    query = f"SELECT num_captured FROM num_captured({quoted_pair(pair)})"
    rows = database.connection.execute(query).fetchall()
    return bool(rows and rows[0][0])


def summary(database: Database, pair: Pair, by: str) -> Rows:
    """The statistics of a pair: exact columns where every token has them, bounds where one has not."""
    rows = database.ask(f"SELECT * FROM {BY[by]}({quoted_pair(pair)})")
    is_exact = all(row["mean_tv"] is not None for row in rows.dicts())
    ends = {f"{kind}_{name}_{end}" for name in _DIVERGENCES for kind in ("mean", "max") for end in ("low", "high")}
    exact = {f"{kind}_{name}" for name in _DIVERGENCES for kind in ("mean", "max")}
    hidden = ends if is_exact else exact | {"num_unsupported_ab", "num_unsupported_ba"}
    return rows.without(hidden)


def _how_to_capture(database: Database, pair: Pair) -> str:
    where = " and ".join(source.store.url for source in database.sources)
    query = 'SELECT DISTINCT "pass" FROM scores WHERE dense IS NOT NULL ORDER BY ALL'
    captured = [name for (name,) in database.connection.execute(query).fetchall()]
    lacking = [name for name in pair if name not in captured]
    problem = (
        f"pass {' and '.join(repr(name) for name in lacking)} captured no distributions"
        if lacking
        else f"{pair[0]!r} and {pair[1]!r} captured distributions of different sequences"
    )
    there = f"; captured: {', '.join(captured)}" if captured else ""
    return (
        f"{where}: {problem}{there}; capture with `tim-trace record --capture topk:20`, or later with `tim-trace replay "
        "RUN --capture logits` (with --force for an arm that is there without)"
    )
