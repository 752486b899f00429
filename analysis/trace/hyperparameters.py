"""The hyperparameters of a run, as the trace has them."""

from __future__ import annotations

from typing import Any

from ...schemas.layout import HYPERPARAMETER
from .database import Database

_ROWS = """
SELECT name, value, text FROM metrics
WHERE step = 0 AND starts_with(name, $prefix) AND ($run IS NULL OR run = $run)
ORDER BY logged_at
"""


def read_hyperparameters(database: Database, run: str | None = None) -> dict[str, Any]:
    """Name, without its prefix -> number or text; of one that was recorded twice the last. None asks all that is open."""
    rows = database.connection.execute(_ROWS, {"prefix": HYPERPARAMETER, "run": run}).fetchall()
    return {name.removeprefix(HYPERPARAMETER): text if value is None else value for name, value, text in rows}
