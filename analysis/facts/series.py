"""The series of a run: one value of a quantity per step.

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
"""Series -> its kind, and the scale on which its changes are found."""


def _no_steps() -> Array:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Series:
    """A quantity over the steps of a run."""

    name: str
    steps: Array
    """[n] int64, ascending."""
    values: Array
    """[n] float64, in the unit of the quantity; NaN at steps without a finite value."""
    scale: str
    """`linear`, `log` or `logit`: the scale on which changes are found."""
    kind: str
    """`mismatch`, `optimizer`, `reward`, `length`, `entropy`, `policy` or `weights`."""
    source: str = ""
    """Where the values come from, in words."""
    not_finite: Array = field(default_factory=_no_steps)
    """Steps with a NaN or infinite value."""
    logged: str = ""
    """Name under which the trainer logged the series; empty if the series was computed."""

    @property
    def known(self) -> Array:
        """[n] bool: True at steps with a value."""
        return np.asarray(np.isfinite(self.values))

    @property
    def not_finite_since(self) -> int | None:
        """First step from which on every recorded value is NaN or infinite; None if the last value is finite."""
        is_number = self.known & ~np.isin(self.steps, self.not_finite)
        since = self.not_finite[self.not_finite > self.steps[is_number].max(initial=-1)]
        return int(since[0]) if len(since) else None

    @property
    def scaled(self) -> Array:
        """[n] values on the series' scale; NaN stays NaN.

        On a log scale, values are raised to at least half of the smallest positive value, or a billionth of the median
        positive value if that is more. On a logit scale, the same applies to distances from 0 and from 1.
        """
        if self.scale == LINEAR or not self.known.any():
            return self.values.copy()
        if self.scale == LOG:
            return np.asarray(np.log(_off_zero(self.values)))
        return np.asarray(np.log(_off_zero(self.values)) - np.log(_off_zero(1.0 - self.values)))


def _off_zero(values: Array) -> Array:
    """Return the values raised to at least a positive floor; all 1 if no value is positive."""
    above = values[values > 0]
    if not len(above):
        return np.where(np.isfinite(values), 1.0, np.nan)
    return np.asarray(np.maximum(values, max(above.min() / 2, 1e-9 * float(np.median(above)))))


def named(
    name: str, steps: Array, values: Array, source: str, not_finite: Array | None = None, logged: str = ""
) -> Series:
    """Build a series of KINDS; infinities become NaN, and their steps are added to `not_finite`."""
    kind, scale = KINDS[name]
    infinite = np.isinf(values)
    without_value = steps[infinite] if not_finite is None else np.union1d(steps[infinite], not_finite)
    return Series(name, steps, np.where(infinite, np.nan, values), scale, kind, source, without_value, logged)


_NO_STEPS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Column:
    """A series stored only at the steps that have a value."""

    name: str
    steps: np.ndarray
    """[m] int64, ascending."""
    values: np.ndarray
    """[m] float64"""
    source: str
    not_finite: np.ndarray = field(default_factory=lambda: _NO_STEPS)
    """Steps with a NaN or infinite value."""
    logged: str = ""
    """Name under which the trainer logged the series; empty if the series was computed."""


def by_step(database: Database, query: str, values: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Return the columns of a query as float64, with NaN for NULL; `step` as int64."""
    rows = database.connection.execute(query, dict(values or {})).fetchnumpy()
    steps = np.asarray(rows.pop("step"), np.int64)  # float64 cannot hold all int64 values
    return {"step": steps} | {
        name: np.asarray(np.ma.filled(column.astype(np.float64), np.nan)) for name, column in rows.items()
    }


def columns_of(
    rows: dict[str, np.ndarray], sources: Mapping[str, str], not_finite: Mapping[str, np.ndarray] | None = None
) -> list[Column]:
    """Return the columns of a query that have a value, with their sources.

    `not_finite`: column -> steps with a NaN or infinite value.
    """
    columns = []
    for name, source in sources.items():
        if name in rows:
            lacking = (not_finite or {}).get(name, _NO_STEPS)
            has = ~np.isnan(rows[name]) | np.isin(rows["step"], lacking)
            columns.append(Column(name, rows["step"][has], rows[name][has], source, lacking))
    return [column for column in columns if len(column.steps)]
