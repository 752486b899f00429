"""Shapes: N sequences."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.errors import InvalidOption
from ...schemas.results import Table
from ..rows import table
from ..statistics.estimators import Array, addable
from ..statistics.intervals import numbered, student_quantile, unit
from ..trace.database import Database
from ..trace.macros import quoted_pair
from ..trace.pair_sums import OF_DIFFERENCES, OF_PROBABILITIES
from ..trace.source import Pair

OWN = "tim"
"""Source of tim-trace's own metrics in a condition. Any other source is a framework."""

CHECK = "check"
CERTIFICATE = "certificate"
"""Conditions without a threshold: `check` is met if the comparison has a fault or too few tokens, and `certificate` if
the run deviates from the certificate."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_FORM = re.compile(
    r"\s*(?P<source>[a-z][a-z0-9-]*)\.(?P<size>\|?)(?P<metric>[^\s<>=|]+)(?P=size)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>\S+)"
    r"(?P<over>\s+any\s+step|\s+last\s+(?P<last>[1-9]\d*)\s+steps?)?\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A failure condition: a bound on a metric over the run, the last steps, or any single step."""

    text: str
    source: str
    """`tim`, or the framework that defines the metric."""
    metric: str
    """The metric's full name, or the part after the last `/`."""
    sign: str
    bound: float
    of_size: bool
    """True if the condition applies to the absolute value (`tim.|k1|>0.1`)."""
    any_step: bool
    """True if the gate fails as soon as a single step meets the condition."""
    last: int
    """Number of steps at the end of the run to evaluate together, or 0 for the whole run."""

    def judged(self, value: float) -> float:
        return abs(value) if self.of_size else value

    def holds(self, value: float) -> bool:
        """Return True if a value meets the failure condition. NaN and infinities always do."""
        return not math.isfinite(value) or _OPERATORS[self.sign](value, self.bound)

    def worst_step(self, by_step: Mapping[int, float]) -> int | None:
        sign = 1 if self.sign in (">", ">=") else -1
        return max(by_step, key=lambda step: (math.isnan(by_step[step]), sign * by_step[step]), default=None)


def parse_condition(text: str) -> Condition:
    """Parse `<source>.<metric><sign><number>` and an optional `any step` or `last N steps`. Raises InvalidOption."""
    found = _FORM.fullmatch(text)
    try:
        bound = float(found["bound"]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or math.isnan(bound):
        guess = _FORM.fullmatch(f"{OWN}.{text}")
        near = f"did you mean '{OWN}.{text}'? Use" if guess and "." not in guess["metric"] else "use"
        raise InvalidOption(
            f"got {text!r}; {near} 'check', or a metric and a threshold in quotes, e.g. 'tim.k3>1e-3' or "
            "'verl.k3_kl>=0.05'; append 'any step' or 'last N steps' to test these steps instead of the whole run",
            option="fail_on",
        )
    return Condition(
        text=text, source=found["source"], metric=found["metric"], sign=found["sign"], bound=bound,
        of_size=bool(found["size"]), any_step="any" in (found["over"] or ""), last=int(found["last"] or 0),
    )  # fmt: skip


def metric_named(condition: Condition, names: list[str]) -> str:
    """Return a metric's full name: an exact match, or the only name ending in `/metric`. Raises InvalidOption."""
    if condition.metric in names:
        return condition.metric
    ends = [name for name in names if name.endswith(f"/{condition.metric}")]
    if len(ends) == 1:
        return ends[0]
    problem = f"{condition.text!r} is ambiguous: {' or '.join(ends)}; write the full name"
    if not ends:
        problem = f"{condition.source} has no metric {condition.metric!r}; {_near(condition.metric, names)}"
    raise InvalidOption(problem, option="fail_on")


def _near(metric: str, names: list[str]) -> str:
    import difflib

    short = {name.rsplit("/", 1)[-1]: name for name in names}
    near = difflib.get_close_matches(metric.rsplit("/", 1)[-1], short, n=3, cutoff=0.5)
    near += [name for name in short if metric in name and name not in near][:3]
    return f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(short)}"


FAILED, PASSED, CANNOT_TELL = "failed", "passed", "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    condition: str
    metric: str
    """The metric's full name, `check` or `certificate`."""
    value: float
    """Value of the metric over the run, over its last steps, or at the worst step. For `check`, it is the number of
    faults. For `certificate`, it is the number of deviations."""
    low: float | None
    """`low` to `high` is the confidence interval. If None, `how` says why."""
    high: float | None
    bound: float | None
    verdict: str
    """`failed`, `passed`, or `cannot tell` if the interval contains the bound or could not be computed, or if `check`
    has too few tokens."""
    fails: bool
    """True if this condition makes the gate fail: it is met, or too many tokens were left out to decide."""
    steps_beyond: int | None
    """Number of steps that meet the condition. None for `check` and for counts, which are totals over the run."""
    worst_step: int | None
    """Step with the worst value: furthest beyond the bound or, if none is beyond it, closest to it."""
    how: str
    """Number of steps that meet the condition, and how the interval was computed. For `check`, a list of the faults."""

    @property
    def warns(self) -> bool:
        """True if single steps meet the condition, but all steps together do not."""
        return not self.fails and bool(self.steps_beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated(Table):
    _text = "tim_trace.analysis.gate.gate:gated_text"

    verdicts: tuple[Verdict, ...]

    @property
    def fails(self) -> bool:
        return any(verdict.fails for verdict in self.verdicts)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        rows = table(self.verdicts)
        return rows.columns, rows.rows


LARGEST = {"max_abs_d": "max_abs_d", "prob_diff_max": "max_prob_diff"}
"""Maps each `stats` column that is a maximum to the column with the maximum per sequence."""

MOST_NULL = 0.5
"""A metric is judged inconclusive if more than this share of loss tokens lacks a logprob."""

QUANTILES = {"p50_abs_d": 0.5, "p95_abs_d": 0.95, "p99_abs_d": 0.99}

COUNTS = ("num_sequences", "num_tokens", "num_nan", "num_inf")
"""`stats` columns that are counts, which get no confidence interval."""


def is_count(metric: str) -> bool:
    """True if the metric is a total that grows with every step, such as `num_tokens`."""
    return metric.rsplit("/", 1)[-1].startswith("num_")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceColumns:
    """Per-sequence statistics of the sequences with a comparable token."""

    values: dict[str, Array]
    """Columns [N] by name. The metrics are computed from the totals of these columns."""
    largest: dict[str, Array]
    """Maxima [N] per sequence, by the column names in LARGEST."""
    unit_N: np.ndarray
    step_N: np.ndarray

    @classmethod
    def read(cls, database: Database, pair: Pair) -> SequenceColumns:
        names = ("num_tokens", *OF_DIFFERENCES, *OF_PROBABILITIES)
        query = f"""
            SELECT {", ".join(names)}, {unit("s")} AS unit, step
            FROM pair_sums({quoted_pair(pair)}) AS sums JOIN sequences AS s USING (run, step, seq_id)
            WHERE sum_d IS NOT NULL ORDER BY sums.run, sums.step, sums.seq_id, iteration_a, iteration_b
        """
        found = database.connection.execute(query).fetchnumpy()
        sums = {name: np.asarray(found[name], dtype=np.float64) for name in names}
        largest = {name: sums[name] for name in LARGEST.values()}
        unit_N, step_N = np.asarray(found["unit"]), np.asarray(found["step"])
        return cls(values=addable(sums), largest=largest, unit_N=unit_N, step_N=step_N)

    def reach(self) -> float:
        """Return a 99.9% upper prediction bound for a new sequence's sqrt(sum d^2) (nats).

        The sequences that dominate exp(sum d) are rare, so the estimate extrapolates from a lognormal fit.
        """
        squares, num_groups = self.values["sum_d2"], numbered(self.unit_N)[1]
        logs = np.log(squares[squares > 0]) / 2
        if len(logs) < 2 or num_groups < 2:
            return 0.0
        beyond = student_quantile(0.999, num_groups - 1) * np.sqrt(1 + 1 / num_groups)
        return float(np.exp(logs.mean() + beyond * logs.std(ddof=1)))


_LEFT_OUT = """
    SELECT sum(num_tokens), sum(num_nan), sum(num_inf), sum(num_counted)
    FROM pair_sums({pair}) JOIN (
        SELECT run, step, seq_id, CASE WHEN response_mask IS NULL THEN num_response_tokens
                                       ELSE coalesce(list_sum(response_mask::INTEGER[]), 0) END AS num_counted
        FROM sequences
    ) USING (run, step, seq_id)
"""


def left_out(database: Database, pair: Pair) -> str:
    """Describe tokens excluded from a pair's metrics. Missing logprobs are mentioned only if most tokens lack one."""
    counts = database.connection.execute(_LEFT_OUT.format(pair=quoted_pair(pair))).fetchall()[0]
    num_finite, num_nan, num_inf, num_counted = (int(count or 0) for count in counts)
    parts = [f"{count:,} are {what}" for count, what in ((num_nan, "NaN"), (num_inf, "infinite")) if count]
    num_null = num_counted - num_finite - num_nan - num_inf
    if num_null > MOST_NULL * num_counted:
        parts.append(f"{num_null:,} have no logprob in one of the passes")
    return f"of {num_counted:,} tokens in the loss, {' and '.join(parts)}; the value excludes them" if parts else ""
