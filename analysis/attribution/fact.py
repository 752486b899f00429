from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..facts.series import Fall
from ..statement import Measured, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(Statement):
    """An observation about a run or its baseline. `code` is a key in text.EVIDENCE or text.DIFFERENCES."""

    level: float
    """Signed strength, from -1 to 1."""
    group: str = ""
    """Subdivides facts with the same code, e.g. changed settings by suspect."""
    kind: str = ""
    """Name of the model feature if facts with different codes share it, else empty."""

    @property
    def feature(self) -> str:
        return self.kind or (f"{self.code}.{self.group}" if self.group else self.code)

    def order(self, fall: Fall | None) -> str | None:
        step = self.values.get("step")
        if fall is None or not isinstance(step, int):
            return None
        return "before" if step < fall.interval[0] else "after" if step > fall.latest else "with"

    def value(self, *names: str) -> float | int | str | None:
        return next((self.values[name] for name in names if name in self.values), None)


def fact(code: str, level: float, group: str = "", kind: str = "", /, **values: Measured) -> Fact:
    bounded = 0.0 if math.isnan(level) else float(np.clip(level, -1.0, 1.0))
    return Fact(code=code, level=bounded, group=group, kind=kind, values=values)


def strongest(look: Callable[..., Iterator[Fact]]) -> Callable[..., Iterator[Fact]]:
    """Make a function yield only its fact with the highest level."""
    return lambda *given: iter(sorted(look(*given), key=lambda one: -one.level)[:1])


def of_ratio(after: float, before: float, most: float) -> float:
    """Convert a ratio to a level on a log scale: 1 if `after` >= `most` * `before`, -1 if `before` >= `most` * `after`."""
    if not (math.isfinite(after) and math.isfinite(before)) or min(after, before) < 0:
        return 0.0
    return float(np.clip(math.log((after + 1e-12) / (before + 1e-12)) / math.log(most), -1.0, 1.0))
