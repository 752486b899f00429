"""Collect all recorded changes of a run, with step, old and new value, and size relative to scatter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from ..statistics.estimators import Array
from ..trace.database import Database, cached
from ..trace.macros import quoted_pair
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
    LOG,
    MISMATCH,
    OPTIMIZER,
    POLICY,
    REWARD,
    WEIGHTS,
    Fall,
    Series,
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
"""Kinds of changes that follow from the policy, and so may be consequences of an earlier change in an input."""

CLEAR_SD = 4.0
"""A change in an input of at least this size, in standard deviations, is certain and can have consequences."""

BEFORE, WITH, AFTER = "before", "with", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChange:
    """One recorded change of a series."""

    series: str
    kind: str
    """`mismatch`, `reward`, `optimizer` and the other kinds of series; `setting`, `prompts`, `sampling`, `advantages`, `reference`, `mask`,
    `writers`, `contract`; `logged` for other metrics of the trainer."""
    step: int
    low: int
    high: int
    """Last step of the 95% confidence interval, which starts at `low`; both equal `step` if the change was deliberate."""
    before: float | str
    after: float | str
    size_in_sd: float | None
    """after - before on the scale of the series, in standard deviations of its scatter; None if deliberate."""
    shape: str
    """`shift` if the level jumps, `ramp` if the slope changes, `set` if the change was deliberate."""
    order: str = ""
    """`before` the drop (disjoint intervals), `with` it, or `after` it; empty without a drop."""
    follows: str = ""
    """Name of the series whose earlier change caused this one; empty if there is none."""


@cached
def read_recorded(database: Database, pair: Pair) -> tuple[RecordedChange, ...]:
    """Return all changes recorded in the open run, ordered by step.

    Series are searched with `read_changes`, so that all commands report the same step.
    """
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
    """Return the changes of several runs as rows of the SQL view `changes`; numbers and texts have separate columns."""
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
    """Return the changes within or shortly before the onset interval of a drop, largest first, consequences last."""
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
    """Return the changes of a setting; a gradual change (ramp, controller) has an interval from its first to last step."""
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
    """Yield changes of a pass's contract."""
    rows = database.connection.execute(_CONTRACTS).fetchall()
    known: dict[str, str] = {}
    for name, step, contract in rows:
        if name in known and known[name] != contract and not name.startswith("replay/"):
            yield _made(name, CONTRACT, step, known[name][:8], contract[:8])
        known[name] = contract


def _writers(database: Database, pair: Pair) -> Iterator[RecordedChange]:
    """Yield changes in the number of processes, and processes whose mismatch departs from that of the other
    processes."""
    count = read_num_writers(database, pair)
    if count is not None:
        yield from _set(count) if is_held(count.values) else (_of_series(count, one) for one in change_points(count))
    for series, change in writers_apart(database, pair):
        yield _of_series(series, change)


def _folded(changes: list[RecordedChange], fall: Fall | None) -> Iterator[RecordedChange]:
    """Yield the changes with their order relative to the drop, and the earlier change that caused them, if any."""
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


def order_beside(change: RecordedChange, fall: Fall) -> str:
    """Return whether a change came before a drop (disjoint intervals), with it, or after it."""
    if change.high < fall.low:
        return BEFORE
    return AFTER if change.low > max(fall.high, fall.fallen) else WITH


WRITERS = "writers"

_MOST = 256
"""Maximum number of writers per pass that are compared one by one."""
_APART = 2.0
"""Minimum ratio between a writer's mean |d| and that of the other writers for the writer to be reported."""

# Group by rank, because a restarted rank writes under a new name.
_WHO = "coalesce('rank ' || nullif(regexp_extract(writer, '^r([0-9]+)-p', 1), ''), writer)"
_NAMES = f'SELECT DISTINCT {_WHO} FROM scores WHERE "pass" = $name ORDER BY 1'
_COUNTS = f"""
SELECT step, count(DISTINCT {_WHO}) AS num_writers FROM scores WHERE "pass" IN ($a, $b) GROUP BY step ORDER BY step
"""
_APART_BY = f"""
SELECT step, {_WHO} AS writer, sum(mean_abs_d * num_tokens) AS total, sum(num_tokens) AS n
FROM pair_sequences({{pair}}) JOIN (SELECT run, step, seq_id, writer FROM scores WHERE "pass" = $name AND iteration = 0)
    USING (run, step, seq_id)
WHERE isfinite(mean_abs_d) GROUP BY ALL ORDER BY step, writer
"""


def read_num_writers(database: Database, pair: Pair) -> Series | None:
    """Return the number of processes that recorded scores of the pair, by step; None if the pair has no scores."""
    rows = database.connection.execute(_COUNTS, {"a": pair[0], "b": pair[1]}).fetchnumpy()
    steps, counts = np.asarray(rows["step"], np.int64), np.asarray(rows["num_writers"], float)
    return (
        Series("num_writers", steps, counts, LINEAR, WRITERS, "processes that recorded scores") if len(steps) else None
    )


def writers_apart(database: Database, pair: Pair) -> Iterator[tuple[Series, ChangePoint]]:
    """Yield, for each pass, the writers whose mean |d| departs from that of the other writers, with the change.

    The series is a writer's mean |d| divided by the mean |d| of all other writers at the same step.
    """
    names = {name: database.connection.execute(_NAMES, {"name": name}).fetchall() for name in pair}
    is_one = names[pair[0]] == names[pair[1]]  # each process recorded both passes of its sequences
    for name in pair[:1] if is_one else pair:
        if not 2 <= len(names[name]) <= _MOST:
            continue
        rows = database.connection.execute(_APART_BY.format(pair=quoted_pair(pair)), {"name": name}).fetchnumpy()
        steps, at = np.unique(np.asarray(rows["step"], np.int64), return_inverse=True)
        writers, column = np.unique(np.asarray(rows["writer"]).astype(str), return_inverse=True)
        total_nW, count_nW = np.zeros((len(steps), len(writers))), np.zeros((len(steps), len(writers)))
        total_nW[at, column], count_nW[at, column] = rows["total"], rows["n"]
        ratio_nW = _beside_others(total_nW, count_nW)
        whose = "" if is_one else f"{name}'s "
        for place, writer in enumerate(writers):
            series = Series(
                f"mean_abs_d of {whose}{writer}", steps, ratio_nW[:, place], LOG, WRITERS,
                "mean |d| of the writer's tokens, divided by that of the other writers",
            )  # fmt: skip
            for change in change_points(series):
                factor = change.after / change.before if change.before > 0 else np.inf
                if factor >= _APART and change.after >= _APART:
                    yield series, change


def _beside_others(total_nW: Array, count_nW: Array) -> Array:
    """Return each writer's mean divided by the mean of all other writers, [n, W]; NaN if either is missing."""
    others = total_nW.sum(1, keepdims=True) - total_nW, count_nW.sum(1, keepdims=True) - count_nW
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (total_nW / count_nW) / (others[0] / others[1])
    return np.where(np.isfinite(found), found, np.nan)


_FACTOR = 1.5
"""Minimum ratio of the two values for the sentence to state a factor."""


def change_sentence(change: RecordedChange) -> str:
    """Return a sentence with the series, its old and new value, and the step of the change."""
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
