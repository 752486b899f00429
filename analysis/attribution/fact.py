"""Facts: observations about a run, or about how it differs from its baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..facts.series import Fall
from ..statement import Measured, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(Statement):
    """One observation; its code is a key in text.EVIDENCE or text.DIFFERENCES.

    `values` may include `step`, `low`, `high`, `series`, and the values before and after a change.
    """

    level: float
    """Strength, -1 to 1; 0 if nothing was observed."""
    group: str = ""
    """Distinguishes facts of one code, e.g. by the suspect that a setting belongs to."""
    kind: str = ""
    """Shared by codes that are one feature to the model; usually empty."""

    @property
    def feature(self) -> str:
        """The model feature that the fact sets."""
        return self.kind or (f"{self.code}.{self.group}" if self.group else self.code)

    def order(self, fall: Fall | None) -> str | None:
        """Return whether the fact is dated `before`, `with` or `after` a drop; None without a date or a drop."""
        step = self.values.get("step")
        if fall is None or not isinstance(step, int):
            return None
        return "before" if step < fall.interval[0] else "after" if step > fall.latest else "with"

    def value(self, *names: str) -> float | int | str | None:
        """Return the first of the named values that the fact has, or None."""
        return next((self.values[name] for name in names if name in self.values), None)


def fact(code: str, level: float, group: str = "", kind: str = "", /, **values: Measured) -> Fact:
    """Return a fact with its level clipped to -1 to 1; NaN becomes 0."""
    bounded = 0.0 if math.isnan(level) else float(np.clip(level, -1.0, 1.0))
    return Fact(code=code, level=bounded, group=group, kind=kind, values=values)


def of_ratio(after: float, before: float, most: float) -> float:
    """Return a log ratio as a level: 1 if `after` is at least `most` times `before`, -1 the other way round."""
    if not (math.isfinite(after) and math.isfinite(before)) or min(after, before) < 0:
        return 0.0
    return float(np.clip(math.log((after + 1e-12) / (before + 1e-12)) / math.log(most), -1.0, 1.0))
