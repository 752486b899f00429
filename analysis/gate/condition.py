"""A condition on a number of a run, as `verl.k3_kl>1e-3`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from ...schemas.errors import InvalidOption

OWN = "tim"
"""Source of tim-trace's own statistics, beside the frameworks."""

CHECK = "check"
"""The condition that the comparison is not valid."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*(?P<source>[a-z][a-z0-9-]*)\.(?P<metric>[^\s<>=]+)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A bound on a number; the gate fails when it is violated."""

    text: str
    """As it was given."""
    source: str
    """`tim`, or the framework whose number it is."""
    metric: str
    """Its name, or the last part of it."""
    sign: str
    """`>`, `>=`, `<` or `<=`."""
    bound: float

    def holds(self, value: float) -> bool:
        """Whether the gate fails for a value. NaN and infinities fail every gate: they prove nothing."""
        return not math.isfinite(value) or _OPERATORS[self.sign](value, self.bound)


def parse_condition(text: str) -> Condition:
    """Read `<tim or a framework>.<metric> <sign> <number>`. Raises InvalidOption."""
    found = _FORM.fullmatch(text)
    try:
        bound = float(found["bound"]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or math.isnan(bound):
        raise InvalidOption(
            f"got {text!r}; write check, or a number and its bound, as tim.k3>1e-3 or verl.k3_kl>=0.05",
            option="fail_on",
        )
    return Condition(text=text, source=found["source"], metric=found["metric"], sign=found["sign"], bound=bound)


def metric_named(condition: Condition, names: list[str]) -> str:
    """The full name of a condition's metric: itself, or the one name that ends in it after a slash. Raises InvalidOption."""
    if condition.metric in names:
        return condition.metric
    ends = [name for name in names if name.endswith(f"/{condition.metric}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise InvalidOption(
            f"{condition.text!r} is ambiguous: {' or '.join(ends)}; write the whole name", option="fail_on"
        )
    raise InvalidOption(
        f"{condition.source} has no number {condition.metric!r}; {_near(condition.metric, names)}", option="fail_on"
    )


def _near(metric: str, names: list[str]) -> str:
    import difflib

    short = {name.rsplit("/", 1)[-1]: name for name in names}
    near = difflib.get_close_matches(metric.rsplit("/", 1)[-1], short, n=3, cutoff=0.5)
    near += [name for name in short if metric in name and name not in near][:3]
    return f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(short)}"
