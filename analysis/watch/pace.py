"""How long ago the last record was, and how fast steps come."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from ...schemas.layout import JOURNAL, TABLES, TEMPORARY_PREFIX
from ...tracer.store import Store
from ..trace.database import Database

STEPS = 20
"""Steps that the rate is over."""

_LOGGED = """
SELECT step, epoch(max(logged_at)) FROM metrics WHERE step > 0 AND logged_at IS NOT NULL
GROUP BY step ORDER BY step DESC LIMIT $steps
"""

Times = list[tuple[int, float]]
"""(step, seconds since 1970), steps ascending."""


def logged_times(database: Database) -> Times:
    """When the last steps were logged."""
    found: Times = database.connection.execute(_LOGGED, {"steps": STEPS + 1}).fetchall()
    return found[::-1]


def rate(times: Times) -> float | None:
    """Steps a minute from the first to the last; None where they do not tell."""
    if len(times) < 2 or times[-1][1] <= times[0][1]:
        return None
    return 60 * (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1])


def newest_file(store: Store) -> float | None:
    """When a file of the tables or a journal was last added to, seconds since 1970; None where the storage does not say."""
    found = []
    for folder in (JOURNAL, *TABLES):
        try:
            entries = store.filesystem.ls(store.path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        names = [(entry["name"].rsplit("/", 1)[-1], entry) for entry in entries if entry["type"] == "file"]
        found += [when for name, entry in names if not name.startswith(TEMPORARY_PREFIX) and (when := _modified(entry))]
    return max(found, default=None)


def seconds(text: str) -> float:
    """A time in ISO 8601 as seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def ago(then: float) -> float:
    """Seconds since then; clocks of two machines may differ, so never below 0."""
    return max(0.0, time.time() - then)


def _modified(entry: dict[str, Any]) -> float | None:
    for name in ("mtime", "LastModified", "last_modified", "updated"):
        value = entry.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):
            return seconds(value)
        if value:
            return float(value)
    return None
