"""A trace's own figures, under the names and definitions of those that publish theirs."""

from __future__ import annotations

from ..database import Database, quoted
from ..source import Pair
from .alarms import ALARMS


def own_metrics(database: Database, pair: Pair) -> dict[str, float]:
    """Column of `stats`, or `framework: name`, -> value over the whole run."""
    values = _row(database, f"SELECT * FROM pair_runs({quoted(pair[0])}, {quoted(pair[1])})")
    frameworks = {alarm.metric.partition(":")[0] for alarm in ALARMS if ":" in alarm.metric}
    for framework in sorted(frameworks):
        row = _row(database, f"SELECT * FROM {framework.replace('-', '_')}_runs({quoted(pair[0])}, {quoted(pair[1])})")
        values |= {f"{framework}: {name}": value for name, value in row.items()}
    return values


def _row(database: Database, query: str) -> dict[str, float]:
    rows = database.ask(query).dicts()
    return {name: float(value) for name, value in rows[0].items() if isinstance(value, (int, float))} if rows else {}
