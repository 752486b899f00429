"""Parse a condition on a number of a run, such as `verl.k3_kl>1e-3`; the outcome of a gate's conditions."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import InvalidOption
from ...schemas.results import Table
from ..rows import table

OWN = "tim"
"""Source name of tim-trace's own statistics in a condition; all other source names are frameworks."""

CHECK = "check"
"""Name of the condition that fails if the comparison has a fault."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(
    r"\s*(?P<source>[a-z][a-z0-9-]*)\.(?P<size>\|?)(?P<metric>[^\s<>=|]+)(?P=size)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>\S+)"
    r"(?P<over>\s+any\s+step|\s+last\s+(?P<last>[1-9]\d*)\s+steps?)?\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A bound on a number measured over the run, at each step, or over the last steps; the gate fails if the number
    exceeds the bound.
    """

    text: str
    """The condition as given."""
    source: str
    """`tim`, or the framework that defines the number."""
    metric: str
    """Full name of the number, or the part of its name after the last `/`."""
    sign: str
    """`>`, `>=`, `<` or `<=`."""
    bound: float
    of_size: bool
    """True if the absolute value of the number is judged, as in `tim.|k1|>0.1`."""
    any_step: bool
    """True if the condition applies to every step separately, so that one step beyond the bound fails the gate."""
    last: int
    """Number of last steps whose tokens are evaluated together; 0 for all steps of the run."""

    def judged(self, value: float) -> float:
        """Return the value to compare with the bound: the number, or its size."""
        return abs(value) if self.of_size else value

    def holds(self, value: float) -> bool:
        """Return True if a value violates the condition. NaN and infinities always count as violations, because they
        prove nothing."""
        return not math.isfinite(value) or _OPERATORS[self.sign](value, self.bound)

    def worst_step(self, by_step: Mapping[int, float]) -> int | None:
        """Return the step whose value is furthest beyond the bound, or nearest to it; None if no step has a value."""
        sign = 1 if self.sign in (">", ">=") else -1
        return max(by_step, key=lambda step: (math.isnan(by_step[step]), sign * by_step[step]), default=None)


def parse_condition(text: str) -> Condition:
    """Parse a condition `<source>.<metric><sign><number>`, where the source is `tim` or a framework, optionally followed by
    `any step` or `last N steps`. Raises InvalidOption."""
    found = _FORM.fullmatch(text)
    try:
        bound = float(found["bound"]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or math.isnan(bound):
        raise InvalidOption(
            f"got {text!r}; write check, or a number and its bound, e.g. tim.k3>1e-3 or verl.k3_kl>=0.05; append 'any "
            f"step' or 'last N steps' unless the condition covers the whole run",
            option="fail_on",
        )
    return Condition(
        text=text, source=found["source"], metric=found["metric"], sign=found["sign"], bound=bound,
        of_size=bool(found["size"]), any_step="any" in (found["over"] or ""), last=int(found["last"] or 0),
    )  # fmt: skip


def metric_named(condition: Condition, names: list[str]) -> str:
    """Return the full name of a condition's metric: an exact match, or the only name that ends in `/metric`. Raises
    InvalidOption."""
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


FAILED, PASSED, CANNOT_TELL = "failed", "passed", "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one condition."""

    condition: str
    """The condition as given."""
    metric: str
    """Full name of the number; `check` for the condition that the comparison has no fault."""
    value: float
    """Value of the number over the run, over its last steps, or at the worst step; for `check` the number of faults found."""
    low: float | None
    """Lower end of the interval over groups; None if there is no interval, for the reason given in `how`."""
    high: float | None
    bound: float | None
    verdict: str
    """`failed`, `passed`, or `cannot tell` if the interval contains the bound, or is expected but missing."""
    fails: bool
    """True if the value violates the condition, or proves nothing because tokens are excluded from the number.
    Determines the exit code.
    """
    steps_beyond: int | None
    """Number of steps whose own value violates the condition; None for `check` and for counts, which grow with the steps."""
    worst_step: int | None
    """Step whose own value is furthest beyond the bound, or nearest to it."""
    how: str
    """Steps beyond the bound, and how the interval was computed; for `check` the faults found."""

    @property
    def warns(self) -> bool:
        """True if the condition passes although single steps violate it."""
        return not self.fails and bool(self.steps_beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated(Table):
    """The verdicts on all conditions, in the order given."""

    _text = "tim_trace.analysis.gate.reporters:gated_text"

    verdicts: tuple[Verdict, ...]

    @property
    def fails(self) -> bool:
        """True if any condition fails."""
        return any(verdict.fails for verdict in self.verdicts)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = table(self.verdicts)
        return rows.columns, rows.rows
