"""Values by step, as one query gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..trace.database import Database

_NO_STEPS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one series at the steps that have one."""

    name: str
    steps: np.ndarray
    """[m] int64, ascending."""
    values: np.ndarray
    """[m] float64"""
    source: str
    not_finite: np.ndarray = field(default_factory=lambda: _NO_STEPS)
    """Steps at which NaN or an infinity was recorded."""
    logged: str = ""
    """Name that the trainer logged it under; empty where it was computed."""


def by_step(database: Database, query: str, values: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """A query's columns with NULL as NaN; `step`, as int64, says what each row is of."""
    rows = database.connection.execute(query, dict(values or {})).fetchnumpy()
    steps = np.asarray(rows.pop("step"), np.int64)  # float64 does not hold every one
    return {"step": steps} | {
        name: np.asarray(np.ma.filled(column.astype(np.float64), np.nan)) for name, column in rows.items()
    }


def columns_of(
    rows: dict[str, np.ndarray], sources: Mapping[str, str], not_finite: Mapping[str, np.ndarray] | None = None
) -> list[Column]:
    """The columns of a query that have a value at all, each with what its values are of.

    `not_finite`: by column the steps at which NaN or an infinity was recorded.
    """
    columns = []
    for name, source in sources.items():
        if name in rows:
            lacking = (not_finite or {}).get(name, _NO_STEPS)
            has = ~np.isnan(rows[name]) | np.isin(rows["step"], lacking)
            columns.append(Column(name, rows["step"][has], rows[name][has], source, lacking))
    return [column for column in columns if len(column.steps)]
