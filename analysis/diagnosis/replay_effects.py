"""Measure the share of the mismatch that each replay in a trace removes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np

from ...replay.arms import arm_text
from ...schemas.documents import Contract
from ...schemas.passes import REPLAY_PREFIX
from ..statistics.estimators import Array
from ..statistics.intervals import Interval, NoInterval, bootstrap, ends, unit
from ..trace.columns import tell_sampled
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.source import Pair
from .diagnosis import ReplayEffect

_CONFIDENCE = 0.95

_SUMS = """
SELECT count(*) AS num, sum((logprob_a - logprob_b) ** 2) AS gap, sum((logprob_c - logprob_b) ** 2) AS "left",
       any_value({unit}) AS unit
FROM triangle({a}, {b}, {c}) JOIN sequences AS s USING (run, step, seq_id)
GROUP BY run, step, seq_id ORDER BY run, step, seq_id
"""
"""Query for each sequence's number of tokens, sums of squared differences of pass a and of replay c from pass b, and
group."""


_ENGINE_ALONE = {"engine", "mode"}
"""Replay options that select an engine without changing how it computes."""


def replay_effects(database: Database, pair: Pair, passes: list[str]) -> tuple[ReplayEffect, ...]:
    """Return the effect of replacing pass a with each replay, in descending order of the removed share."""
    found, contracts = [], _contracts(database)
    own_engines = _own_engines(contracts, pair[1])
    tell_sampled(database, set(passes) - {*pair})
    for name in passes:
        if not name.startswith(REPLAY_PREFIX) or name in pair:
            continue
        query = _SUMS.format(a=quoted(pair[0]), b=quoted(pair[1]), c=quoted(name), unit=unit("s"))
        rows = database.ask(query).rows
        num, gap, left = (math.fsum(row[place] for row in rows) for place in range(3))
        if num and gap:
            gap_N, left_N = (np.array([row[place] for row in rows], np.float64) for place in (1, 2))
            interval = removed_interval(gap_N, left_N, np.array([row[3] for row in rows], np.uint64))
            arm = name.removeprefix(REPLAY_PREFIX)
            effect = _effect(arm, pair, name in own_engines, int(num), gap / num, left / num, interval)
            found.append(replace(effect, changes=_changes(name, contracts)))
    return tuple(sorted(found, key=lambda each: -each.removed))


def _contracts(database: Database) -> list[tuple[str, Contract]]:
    rows = database.connection.execute('SELECT "pass", contract_json FROM passes').fetchall()
    return [(name, json.loads(text)) for name, text in rows if text]


def _changes(name: str, contracts: list[tuple[str, Contract]]) -> str | None:
    """Return the options that a replay was run with; None if they are missing or ambiguous."""
    arms = {
        arm_text(contract["arm"]) for of, contract in contracts if of == name and isinstance(contract.get("arm"), dict)
    }
    return arms.pop() if len(arms) == 1 else None


def _own_engines(contracts: list[tuple[str, Contract]], engine_pass: str) -> set[str]:
    """Return the names of the replays that only switched to the engine of `engine_pass`."""
    engines = {contract.get("engine") for name, contract in contracts if name == engine_pass} - {None}
    return {
        name
        for name, contract in contracts
        if contract.get("engine") in engines
        and "engine" in (arm := contract.get("arm") or {})
        and set(arm) <= _ENGINE_ALONE
    }


def removed_interval(gap_N: Array, left_N: Array, unit_N: np.ndarray) -> Interval | NoInterval:
    """Return the 95 % interval, over groups, of the removed share 1 - left / gap, from sums per sequence; its upper end is
    at most 1."""
    found = bootstrap(
        {"removed": lambda t: 1 - t["left"] / t["gap"]}, {"gap": gap_N, "left": left_N}, unit_N, _CONFIDENCE
    )["removed"]
    return found if isinstance(found, NoInterval) else (found[0], min(found[1], 1.0))


def _effect(
    arm: str, pair: Pair, is_own_engine: bool, num: int, gap: float, left: float, interval: Interval | NoInterval
) -> ReplayEffect:
    low, high = ends(interval) or (None, None)
    return ReplayEffect(
        arm=arm, pair=pair, is_own_engine=is_own_engine, num_tokens=num, gap_rms=gap**0.5, left_rms=left**0.5, removed=1 - left / gap, low=low, high=high,
        no_interval=str(interval) if isinstance(interval, NoInterval) else None,
    )  # fmt: skip
