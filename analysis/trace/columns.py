"""Find out which optional columns of a trace contain values, and read its hyperparameters and contracts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.layout import HYPERPARAMETER
from .database import Database, cached
from .macros import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalColumns:
    """Which optional columns of the `sequences` table contain a value."""

    mask: bool
    advantage: bool
    """True if the trace has one advantage per response."""
    advantages: bool
    """True if the trace has one advantage per token."""


def sequence_columns(database: Database, run: str | None = None) -> OptionalColumns:
    """Return which optional columns of `sequences` contain a value, in one run, or in any run if `run` is None."""
    return OptionalColumns(
        mask=_has(database, "sequences", "response_mask", run),
        advantage=_has(database, "sequences", "advantage", run),
        advantages=_has(database, "sequences", "advantages", run),
    )


def passes_with(
    database: Database, column: str, run: str | None = None, *, of: Sequence[str] | None = None, first_use: bool = False
) -> frozenset[str]:
    """Return the passes with a value in a column of scores; of some passes, and of iteration 0 for `first_use`."""
    names = scored_passes(database) if of is None else of
    return frozenset(name for name in names if _has(database, "scores", column, run, name, first_use))


@cached
def scored_passes(database: Database) -> list[str]:
    return [name for (name,) in database.connection.execute('SELECT DISTINCT "pass" FROM scores ORDER BY 1').fetchall()]


@cached
def _has(
    database: Database, table: str, column: str, run: str | None, pass_name: str | None = None, first_use: bool = False
) -> bool:
    """Return True if any selected row has a value in a column; the query stops at the first such row."""
    terms = [f"{column} IS NOT NULL"]
    if run is not None:
        terms.append(f"run = {quoted(run)}")
    if pass_name is not None:
        terms.append(f'"pass" = {quoted(pass_name)}')
    if first_use:
        terms.append("iteration = 0")
    query = f"SELECT step FROM {table} WHERE {' AND '.join(terms)} LIMIT 1"
    return bool(database.connection.execute(query).fetchall())


def flat_contract(contract: Any, path: str = "") -> dict[str, str]:
    """Return a contract as dotted path -> text, e.g. `model.attention`; lists and empty values are not split."""
    if isinstance(contract, dict) and contract:
        found: dict[str, str] = {}
        for name, part in contract.items():
            found |= flat_contract(part, f"{path}.{name}" if path else str(name))
        return found
    return {path: field_text(contract)} if path else {}


def field_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
