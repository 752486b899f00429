"""The processes that recorded a run, by step: how many there were, and whether the tokens of one are further off than others'.

Shapes: n steps, W writers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..statistics.estimators import Array
from ..trace.database import Database
from ..trace.quoting import quoted_pair
from ..trace.source import Pair
from .changes import ChangePoint, change_points
from .quantities import LINEAR, LOG, Series

WRITERS = "writers"

_MOST = 256
"""Writers of a pass up to which each is looked at by itself."""
_APART = 2.0
"""Least factor between a writer's mean |d| and that of the others that is told."""

# A rank that is started again writes under a new name, and stays the same rank.
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
    """How many processes recorded scores of the pair, by step; None where nothing did."""
    rows = database.connection.execute(_COUNTS, {"a": pair[0], "b": pair[1]}).fetchnumpy()
    steps, counts = np.asarray(rows["step"], np.int64), np.asarray(rows["num_writers"], float)
    return (
        Series("num_writers", steps, counts, LINEAR, WRITERS, "processes that recorded scores") if len(steps) else None
    )


def writers_apart(database: Database, pair: Pair) -> Iterator[tuple[Series, ChangePoint]]:
    """Of each pass, the writers whose mean |d| leaves that of the others, with the step at which it does.

    The values are a writer's mean |d| over that of all others at the same step.
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
                "mean |d| of the writer's tokens over that of all others",
            )  # fmt: skip
            for change in change_points(series):
                factor = change.after / change.before if change.before > 0 else np.inf
                if factor >= _APART and change.after >= _APART:
                    yield series, change


def _beside_others(total_nW: Array, count_nW: Array) -> Array:
    """[n, W] each writer's mean over that of all others; NaN where either has none."""
    others = total_nW.sum(1, keepdims=True) - total_nW, count_nW.sum(1, keepdims=True) - count_nW
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (total_nW / count_nW) / (others[0] / others[1])
    return np.where(np.isfinite(found), found, np.nan)
