"""Collect all recorded changes of a run: step, old and new value, and size relative to scatter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import pyarrow as pa

from ..trace.database import Database, cached
from ..trace.source import Pair
from .changes import ChangePoint, change_points, read_changes, read_outcomes
from .conditions import (
    ADVANTAGES,
    LOGGED,
    PROMPTS,
    SAMPLING,
    SETTING,
    held_parts,
    is_held,
    read_conditions,
    text_settings,
)
from .read_series import read_series
from .series import (
    ENTROPY,
    LENGTH,
    LINEAR,
    MISMATCH,
    OPTIMIZER,
    POLICY,
    REWARD,
    WEIGHTS,
    Fall,
    Series,
    by_step,
    is_evaluation,
)

SET = "set"
"""`shape` of a deliberate change, whose step is known exactly."""
CONTRACT = "contract"

_CONTRACTS = """
SELECT "pass", step, min(contract) FROM scores GROUP BY ALL HAVING count(DISTINCT contract) = 1 ORDER BY "pass", step
"""

GIVEN = (PROMPTS, SAMPLING, ADVANTAGES, SETTING, CONTRACT)
"""Kinds of changes in inputs, which no policy can cause."""
FOLLOWS = (OPTIMIZER, ENTROPY, LENGTH, WEIGHTS, POLICY, LOGGED)
"""Kinds of changes that the policy causes, perhaps because an input changed before."""

CLEAR_SD = 4.0
"""Size, in standard deviations, from which a change in an input is certain and has consequences."""

BEFORE, WITH, AFTER = "before", "with", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChange:
    series: str
    kind: str
    """`mismatch`, `reward`, `optimizer` and the other kinds of series; `setting`, `prompts`, `sampling`, `advantages`,
    `reference`, `mask`, `writers`, `contract`; `logged` for other metrics of the trainer."""
    step: int
    low: int
    high: int
    """Last step of the 95% confidence interval, which starts at `low`; both equal `step` if the change was
    deliberate."""
    before: float | str
    after: float | str
    size_in_sd: float | None
    """after - before on the scale of the series, in standard deviations of its scatter; None if deliberate."""
    shape: str
    """`shift` if the level jumps, `ramp` if the slope changes, `set` if the change was deliberate."""
    order: str = ""
    """`before` the drop (disjoint intervals), `with` it, or `after` it; empty without a drop."""
    follows: str = ""
    """The series whose earlier change caused this one; may be empty."""


@cached
def read_recorded(database: Database, pair: Pair) -> tuple[RecordedChange, ...]:
    """Return all changes of the open run by step; every command reports the steps of `read_changes`."""
    series = read_series(database, pair=pair)
    fall = read_outcomes(database, pair).fall
    found = [
        _of_series(series[name], change)
        for name, changes in read_changes(database, pair).items()
        for change in changes
        if name in series
    ]
    judged = {fall.outcome, fall.onset_of} if fall else set()
    for one in read_conditions(database).values():
        if one.name in judged or one.name in series or is_evaluation(one.name):
            continue
        found += _set(one) if one.kind == SETTING else [_of_series(one, change) for change in change_points(one)]
    found += [*_texts(database), *_contracts(database), *_writers(database, pair)]
    return tuple(sorted(_folded(found, fall), key=lambda change: (change.step, change.high, change.series)))


def changes_table(database: Database, pair: Pair = ("train", "rollout")) -> pa.Table:
    """Return the SQL view `changes`; numbers and texts have separate columns."""
    rows = [
        {"run": source.run, **{field.name: getattr(change, field.name) for field in fields(change)}}
        for source in database.sources
        for change in read_recorded(database.reopened(source), pair)
    ]
    texts = {"run", "series", "kind", "before_text", "after_text", "shape", "order", "follows"}
    for row in rows:
        for name in ("before", "after"):
            value = row.pop(name)
            row[name] = None if isinstance(value, str) else value
            row[f"{name}_text"] = value if isinstance(value, str) else None
        row["order"] = row["order"] or None
        row["follows"] = row["follows"] or None
    names = ("run", "series", "kind", "step", "low", "high", "before", "after", "before_text", "after_text", "size_in_sd",
             "shape", "order", "follows")  # fmt: skip
    types = [pa.string() if n in texts else pa.int64() if n in ("step", "low", "high") else pa.float64() for n in names]
    schema = pa.schema(list(zip(names, types, strict=True)))
    return pa.Table.from_pylist(rows, schema)


def around(changes: Iterable[RecordedChange], fall: Fall, num_steps: int) -> tuple[RecordedChange, ...]:
    """Return the changes in or shortly before the onset interval of a drop, largest first, consequences last."""
    first, last = fall.interval
    earliest = first - max(num_steps // 10, 5)
    near = [change for change in changes if earliest <= change.high and change.low <= max(last, fall.fallen)]
    return tuple(sorted(near, key=lambda change: (bool(change.follows), -_abnormal(change))))


def _abnormal(change: RecordedChange) -> float:
    return math.inf if change.size_in_sd is None else abs(change.size_in_sd)


def _of_series(series: Series, change: ChangePoint) -> RecordedChange:
    return RecordedChange(
        series=series.name, kind=series.kind, step=change.step, low=change.low, high=change.high, before=change.before,
        after=change.after, size_in_sd=change.size_in_sd, shape=change.kind,
    )  # fmt: skip


def _set(series: Series) -> list[RecordedChange]:
    """Return the changes of a setting. A gradual one (ramp, controller) lasts from its first to its last step."""
    values, steps = series.values, series.steps
    parts = held_parts(values)
    if parts and parts[-1][1] < len(values) - 1:
        parts.append((len(values) - 1, len(values) - 1))  # the setting is still changing at the end of the run
    made = []
    for (_, last), (first, _) in pairwise(parts):
        change = _made(series.name, series.kind, int(steps[last + 1]), float(values[last]), float(values[first]))
        is_ramp = first > last + 1
        made.append(replace(change, high=int(steps[first]), shape="ramp") if is_ramp else change)
    return made


def _made(name: str, kind: str, step: int, before: float | str, after: float | str) -> RecordedChange:
    return RecordedChange(
        series=name, kind=kind, step=step, low=step, high=step, before=before, after=after, size_in_sd=None, shape=SET
    )


def _texts(database: Database) -> Iterator[RecordedChange]:
    for name, values in text_settings(database).items():
        for (_, before), (step, after) in pairwise(values):
            yield _made(name, SETTING, step, before, after)


def _contracts(database: Database) -> Iterator[RecordedChange]:
    rows = database.connection.execute(_CONTRACTS).fetchall()
    known: dict[str, str] = {}
    for name, step, contract in rows:
        if name in known and known[name] != contract and not name.startswith("replay/"):
            yield _made(name, CONTRACT, step, known[name][:8], contract[:8])
        known[name] = contract


def _writers(database: Database, pair: Pair) -> Iterator[RecordedChange]:
    rows = by_step(database, _COUNTS, {"a": pair[0], "b": pair[1]})
    count = Series("num_writers", rows["step"], rows["num_writers"], LINEAR, WRITERS)
    if len(count.steps):
        yield from _set(count) if is_held(count.values) else (_of_series(count, one) for one in change_points(count))


def _folded(changes: list[RecordedChange], fall: Fall | None) -> Iterator[RecordedChange]:
    """Add to each change its order relative to the drop and the earlier change that caused it."""
    given = [change for change in changes if change.kind in GIVEN and _abnormal(change) >= CLEAR_SD]
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
    """Return whether a change came before a drop (disjoint intervals), with it, or after it."""
    if change.high < fall.low:
        return BEFORE
    return AFTER if change.low > max(fall.high, fall.fallen) else WITH


WRITERS = "writers"

# Group by rank, because a restarted rank writes under a new name.
_WHO = "coalesce('rank ' || nullif(regexp_extract(writer, '^r([0-9]+)-p', 1), ''), writer)"
_COUNTS = f"""
SELECT step, count(DISTINCT {_WHO}) AS num_writers FROM scores WHERE "pass" IN ($a, $b) GROUP BY step ORDER BY step
"""
_FACTOR = 1.5
"""Ratio of the two values from which the sentence states a factor."""


def change_sentence(change: RecordedChange) -> str:
    before, after = change.before, change.after
    if isinstance(before, str) or isinstance(after, str) or change.shape == SET:
        verb = "goes" if change.kind == WRITERS else "is set"
        return f"{change.series} {verb} from {_shown(before)} to {_shown(after)} at step {change.step}"
    verb = "jumps" if change.shape == "shift" else "starts to change"
    if before == 0 and after > 0:
        return f"{change.series} is exactly 0 until step {change.step}, then {_shown(after)}"
    when = f"at step {change.step}" + interval_text(change.low, change.high)
    if min(before, after) > 0:
        factor = after / before
        if factor >= _FACTOR:
            times = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
            return f"{change.series} {verb if change.shape == 'shift' else 'starts to grow'} {times}-fold {when}"
        if factor <= 1 / _FACTOR:
            drop = "drops" if change.shape == "shift" else "starts to drop"
            return f"{change.series} {drop} to {factor:.2g} times its earlier level {when}"
    return f"{change.series} {verb} from {_shown(before)} to {_shown(after)} {when}"


def interval_text(low: int, high: int) -> str:
    """Return the 95% confidence interval of a step in parentheses; empty if it is one step wide."""
    return "" if low == high else f" (95% CI {low}-{high})"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
