"""Read the recorded hyperparameters of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...schemas.layout import HYPERPARAMETER

if TYPE_CHECKING:
    from .database import Database

_ROWS = """
SELECT name, value, text FROM metrics
WHERE step = 0 AND starts_with(name, $prefix) AND ($run IS NULL OR run = $run)
ORDER BY logged_at
"""


def read_hyperparameters(database: Database, run: str | None = None) -> dict[str, Any]:
    """Return hyperparameter name, without its prefix -> number or text; if a name was recorded repeatedly, the last
    value. If `run` is None, all open runs are read."""
    rows = database.connection.execute(_ROWS, {"prefix": HYPERPARAMETER, "run": run}).fetchall()
    return {name.removeprefix(HYPERPARAMETER): text if value is None else value for name, value, text in rows}
