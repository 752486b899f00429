from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import pyarrow as pa

from ...schemas.layout import HYPERPARAMETER
from ..trace.database import Database, cached
from ..trace.macros import quoted
from ..trace.source import Pair
from . import conditions, series
from .changes import ChangePoint, change_points, read_changes, read_fall
from .conditions import SETTING
from .read_series import read_evaluations, read_series
from .series import MISMATCH, REWARD, Fall, Series

SET = "set"
CONTRACT = "contract"

_CONTRACTS = """
SELECT "pass", step, lag(min(contract)) OVER (PARTITION BY "pass" ORDER BY step) AS before, min(contract) AS after
FROM scores WHERE NOT starts_with("pass", 'replay/')
GROUP BY "pass", step HAVING count(DISTINCT contract) = 1 QUALIFY after <> before ORDER BY "pass", step
"""
_TEXTS = f"""
SELECT substr(name, {len(HYPERPARAMETER) + 1}), step, lag(text) OVER (PARTITION BY name ORDER BY step) AS before, text
FROM metrics WHERE text IS NOT NULL AND starts_with(name, {quoted(HYPERPARAMETER)})
QUALIFY text <> before ORDER BY name, step
"""

GIVEN = (conditions.PROMPTS, conditions.SAMPLING, conditions.ADVANTAGES, SETTING, CONTRACT)
"""Kinds of changes in a run's inputs, which the policy cannot cause."""
FOLLOWS = (series.OPTIMIZER, series.ENTROPY, series.LENGTH, series.WEIGHTS, series.POLICY, conditions.LOGGED)
"""Kinds of changes that the policy can cause, perhaps in response to an earlier change in the inputs."""

CLEAR_SD = 4.0
"""Minimum size of an input change, in standard deviations, for it to count as the cause of other changes."""

BEFORE, WITH, AFTER = "before", "with", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChange:
    series: str
    kind: str
    """The series' kind, such as `mismatch` or `reward` (see `series.KINDS` and conditions.py), or `contract`."""
    step: int
    low: int
    high: int
    """`low` to `high` is the 95% confidence interval. Both equal `step` for a deliberate change."""
    before: float | str
    after: float | str
    size_in_sd: float | None = None
    """Size of the change on the series' scale, in standard deviations of its noise. None if deliberate."""
    shape: str = SET
    """`shift` for a jump, `ramp` for a new slope, `set` for a deliberate change."""
    order: str = ""
    """Time of the change relative to the drop: `before`, `with` or `after`. Empty if there is no drop."""
    follows: str = ""

    @property
    def abnormal(self) -> float:
        return math.inf if self.size_in_sd is None else abs(self.size_in_sd)


@cached
def read_recorded(database: Database, pair: Pair) -> tuple[RecordedChange, ...]:
    by_name = read_series(database, pair=pair)
    fall = read_fall(database, pair)
    found = [
        _of_series(by_name[name], change)
        for name, changes in read_changes(database, pair).items()
        for change in changes
    ]
    judged = {*read_evaluations(database), *((fall.outcome, fall.onset_of) if fall else ())}
    known = {(one.steps.tobytes(), one.values.tobytes()) for one in by_name.values()}
    for one in conditions.read_conditions(database).values():
        if one.name in judged or one.name in by_name or (one.steps.tobytes(), one.values.tobytes()) in known:
            continue
        known.add((one.steps.tobytes(), one.values.tobytes()))  # one quantity may be logged under several names
        found += _set(one) if one.kind == SETTING else [_of_series(one, change) for change in change_points(one)]
    found += _texts(database)
    return tuple(sorted(_folded(found, fall), key=lambda change: (change.step, change.high, change.series)))


_TABLE = pa.schema([
    ("run", pa.string()), ("series", pa.string()), ("kind", pa.string()), ("step", pa.int64()), ("low", pa.int64()),
    ("high", pa.int64()), ("before", pa.float64()), ("after", pa.float64()), ("before_text", pa.string()),
    ("after_text", pa.string()), ("size_in_sd", pa.float64()), ("shape", pa.string()), ("order", pa.string()),
    ("follows", pa.string()),
])  # fmt: skip


def changes_table(database: Database, pair: Pair = ("train", "rollout")) -> pa.Table:
    """Return the rows for the SQL view `changes`. Numeric values and text values are in separate columns."""
    rows = []
    for source in database.sources:
        for change in read_recorded(database.reopened(source), pair):
            row = asdict(change) | {"run": source.run, "order": change.order or None, "follows": change.follows or None}
            for name in ("before", "after"):
                if isinstance(row[name], str):
                    row[f"{name}_text"] = row.pop(name)
            rows.append(row)
    return pa.Table.from_pylist(rows, _TABLE)


def around(changes: Iterable[RecordedChange], fall: Fall, num_steps: int) -> tuple[RecordedChange, ...]:
    earliest = fall.interval[0] - max(num_steps // 10, 5)
    near = [change for change in changes if earliest <= change.high and change.low <= fall.latest]
    return tuple(sorted(near, key=lambda change: (bool(change.follows), -change.abnormal)))


def _of_series(series: Series, change: ChangePoint) -> RecordedChange:
    return RecordedChange(
        series=series.name, kind=series.kind, step=change.step, low=change.low, high=change.high, before=change.before,
        after=change.after, size_in_sd=change.size_in_sd, shape=change.kind,
    )  # fmt: skip


def _set(series: Series) -> Iterator[RecordedChange]:
    values, steps = series.values, series.steps
    parts = conditions.held_parts(values)
    if parts and parts[-1][1] < len(values) - 1:
        parts.append((len(values) - 1, len(values) - 1))  # the setting is still changing at the end of the run
    for (_, last), (first, _) in pairwise(parts):
        step, high = int(steps[last + 1]), int(steps[first])
        yield RecordedChange(
            series=series.name, kind=series.kind, step=step, low=step, high=high, before=float(values[last]),
            after=float(values[first]), shape="ramp" if first > last + 1 else SET,
        )  # fmt: skip


def _texts(database: Database) -> Iterator[RecordedChange]:
    for kind, query, num_shown in ((SETTING, _TEXTS, None), (CONTRACT, _CONTRACTS, 8)):
        for name, step, before, after in database.connection.execute(query).fetchall():
            values = {"before": before[:num_shown], "after": after[:num_shown]}
            yield RecordedChange(series=name, kind=kind, step=step, low=step, high=step, **values)


def _folded(changes: list[RecordedChange], fall: Fall | None) -> Iterator[RecordedChange]:
    given = [change for change in changes if change.kind in GIVEN and change.abnormal >= CLEAR_SD]
    mismatch = [change for change in changes if change.series == "mean_abs_d"]
    for change in changes:
        order = "" if fall is None else order_beside(change, fall)
        causes = [*given, *mismatch] if change.kind in (*FOLLOWS, REWARD) else given if change.kind == MISMATCH else []
        if change.kind == MISMATCH and change.series != "mean_abs_d":
            causes = [*mismatch, *given]
        before = [cause for cause in causes if cause.low <= change.high and cause is not change]
        first = max(before, key=lambda cause: cause.step, default=None)
        yield replace(change, order=order, follows=first.series if first else "")


def order_beside(change: RecordedChange | ChangePoint, fall: Fall) -> str:
    """Return `before` or `after` if the intervals of the change and the drop do not overlap, else `with`."""
    if change.high < fall.low:
        return BEFORE
    return AFTER if change.low > max(fall.high, fall.fallen) else WITH


_FACTOR = 1.5


def change_sentence(change: RecordedChange, *, is_drop: bool = False) -> str:
    """Describe a change. The step of the drop itself (`is_drop`) is the last one before it."""
    before, after = change.before, change.after
    if isinstance(before, str) or isinstance(after, str) or change.shape == SET:
        return f"{change.series} is changed from {_shown(before)} to {_shown(after)} at step {change.step}"
    if before == 0 and after > 0:
        return f"{change.series} is exactly 0 until step {change.step}, then {_shown(after)}"
    when = f"{'after' if is_drop else 'at'} step {change.step}" + interval_text(change.low, change.high)
    if change.shape == "shift" and before > 0 and after >= _FACTOR * before:
        factor = after / before
        return f"{change.series} jumps {f'{factor:,.0f}' if factor >= 100 else f'{factor:.3g}'}-fold {when}"
    verb = "rises" if after > before else "drops"
    if change.shape != "shift":
        return f"{change.series} starts to {verb.removesuffix('s')} {when}, from {_shown(before)} to {_shown(after)}"
    return f"{change.series} {verb} from {_shown(before)} to {_shown(after)} {when}"


def interval_text(low: int, high: int) -> str:
    """Return a 95% confidence interval in parentheses, or "" if it contains only one step."""
    return "" if low == high else f" (95% CI {low}-{high})"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
