"""Which optional columns of a trace have a value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.layout import HYPERPARAMETER
from .connection import quoted
from .database import Database, cached


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalColumns:
    """Which optional columns of the sequences have a value."""

    mask: bool
    advantage: bool
    """One for a whole response."""
    advantages: bool
    """One for each token."""


def sequence_columns(database: Database, run: str | None = None) -> OptionalColumns:
    """Look which optional columns of the sequences of a run have a value; of all runs where none is named."""
    return OptionalColumns(
        mask=_has(database, "sequences", "response_mask", run),
        advantage=_has(database, "sequences", "advantage", run),
        advantages=_has(database, "sequences", "advantages", run),
    )


def passes_with(
    database: Database, column: str, run: str | None = None, *, of: Sequence[str] | None = None, first_use: bool = False
) -> frozenset[str]:
    """Passes whose scores have a value of a column, `of` these alone; `first_use`: at iteration 0."""
    names = scored_passes(database) if of is None else of
    return frozenset(name for name in names if _has(database, "scores", column, run, name, first_use))


@cached
def scored_passes(database: Database) -> list[str]:
    """Return the passes that have scores, by name."""
    return [name for (name,) in database.connection.execute('SELECT DISTINCT "pass" FROM scores ORDER BY 1').fetchall()]


@cached
def _has(
    database: Database, table: str, column: str, run: str | None, pass_name: str | None = None, first_use: bool = False
) -> bool:
    """Whether a row has a value; it reads no more than it takes to find one."""
    terms = [f"{column} IS NOT NULL"]
    if run is not None:
        terms.append(f"run = {quoted(run)}")
    if pass_name is not None:
        terms.append(f'"pass" = {quoted(pass_name)}')
    if first_use:
        terms.append("iteration = 0")
    query = f"SELECT step FROM {table} WHERE {' AND '.join(terms)} LIMIT 1"
    return bool(database.connection.execute(query).fetchall())


_ROWS = """
SELECT name, value, text FROM metrics
WHERE step = 0 AND starts_with(name, $prefix) AND ($run IS NULL OR run = $run)
ORDER BY logged_at
"""


def read_hyperparameters(database: Database, run: str | None = None) -> dict[str, Any]:
    """Name, without its prefix -> number or text; of one that was recorded twice the last. None asks all that is open."""
    rows = database.connection.execute(_ROWS, {"prefix": HYPERPARAMETER, "run": run}).fetchall()
    return {name.removeprefix(HYPERPARAMETER): text if value is None else value for name, value, text in rows}


def flat_contract(contract: Any, path: str = "") -> dict[str, str]:
    """A contract as path -> text, as `model.attention`; lists and what is empty stay one value."""
    if isinstance(contract, dict) and contract:
        found: dict[str, str] = {}
        for name, part in contract.items():
            found |= flat_contract(part, f"{path}.{name}" if path else str(name))
        return found
    return {path: field_text(contract)} if path else {}


def field_text(value: Any) -> str:
    """A field's value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
