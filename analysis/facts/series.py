"""The series of a run: one value per step of each quantity.

Shapes: n steps, the same for every series of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..trace.database import Database

Array = np.ndarray

LINEAR, LOG, LOGIT = "linear", "log", "logit"
MISMATCH, OPTIMIZER, REWARD, LENGTH, ENTROPY, POLICY, WEIGHTS = (
    "mismatch", "optimizer", "reward", "length", "entropy", "policy", "weights",
)  # fmt: skip

KINDS: dict[str, tuple[str, str]] = {
    "k3": (MISMATCH, LOG),
    "mean_abs_d": (MISMATCH, LOG),
    "p99_abs_d": (MISMATCH, LOG),
    "max_abs_d": (MISMATCH, LOG),
    "mean_d": (MISMATCH, LINEAR),
    "k3_positive": (MISMATCH, LOG),
    "k3_negative": (MISMATCH, LOG),
    "ess": (MISMATCH, LOGIT),
    "reward": (REWARD, LINEAR),
    "reward_std_within_groups": (REWARD, LINEAR),
    "share_groups_without_spread": (REWARD, LOGIT),
    "length": (LENGTH, LOG),
    "share_length_limited": (LENGTH, LOGIT),
    "entropy": (ENTROPY, LOG),
    "grad_norm": (OPTIMIZER, LOG),
    "loss": (OPTIMIZER, LINEAR),
    "learning_rate": (OPTIMIZER, LINEAR),
    "update_to_weight": (OPTIMIZER, LOG),
    "adam_second_moment": (OPTIMIZER, LOG),
    "policy_lag": (POLICY, LINEAR),
    "version_lag": (POLICY, LINEAR),
    "clip_share": (POLICY, LOGIT),
    "changed_weights": (WEIGHTS, LOGIT),
}
"""Series -> its kind, and the scale that its changes are looked for on."""


def _no_steps() -> Array:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over the steps of a run."""

    name: str
    steps: Array
    """[n] int64, ascending."""
    values: Array
    """[n] float64 in the quantity's own unit; NaN where no finite value was recorded."""
    scale: str
    """`linear`, `log` or `logit`: where changes are looked for."""
    kind: str
    """`mismatch`, `optimizer`, `reward`, `length`, `entropy`, `policy` or `weights`."""
    source: str = ""
    """What the values are of, in words."""
    not_finite: Array = field(default_factory=_no_steps)
    """Steps at which NaN or an infinity was recorded in its place."""
    logged: str = ""
    """Name that the trainer logged it under; empty where it was computed."""

    @property
    def known(self) -> Array:
        """[n] bool: steps that have a value."""
        return np.asarray(np.isfinite(self.values))

    @property
    def not_finite_since(self) -> int | None:
        """The first step from which NaN or an infinity was recorded to the end; None where the last value is a number."""
        is_number = self.known & ~np.isin(self.steps, self.not_finite)
        since = self.not_finite[self.not_finite > self.steps[is_number].max(initial=-1)]
        return int(since[0]) if len(since) else None

    @property
    def scaled(self) -> Array:
        """[n] values on the series' scale; NaN stays NaN.

        A logarithm needs a floor for 0: half of the smallest value above 0, but no less than a billionth of the median
        one. Shares are kept as far from 0 and 1 as half of the nearest one that is neither.
        """
        if self.scale == LINEAR or not self.known.any():
            return self.values.copy()
        if self.scale == LOG:
            return np.asarray(np.log(_off_zero(self.values)))
        return np.asarray(np.log(_off_zero(self.values)) - np.log(_off_zero(1.0 - self.values)))


def _off_zero(values: Array) -> Array:
    """Values with a floor above 0; all of them 1 where none is above 0."""
    above = values[values > 0]
    if not len(above):
        return np.where(np.isfinite(values), 1.0, np.nan)
    return np.asarray(np.maximum(values, max(above.min() / 2, 1e-9 * float(np.median(above)))))


def named(
    name: str, steps: Array, values: Array, source: str, not_finite: Array | None = None, logged: str = ""
) -> Series:
    """A series of the catalogue above, its infinities noted and taken out."""
    kind, scale = KINDS[name]
    infinite = np.isinf(values)
    without_value = steps[infinite] if not_finite is None else np.union1d(steps[infinite], not_finite)
    return Series(name, steps, np.where(infinite, np.nan, values), scale, kind, source, without_value, logged)


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
