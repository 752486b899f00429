from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...schemas.errors import NothingToCompare, TimTraceError
from ...schemas.steps import ALL_STEPS
from ...schemas.tables import SAMPLING
from ..check.check import CheckResult, gather, judge
from ..check.data_checks import data_findings
from ..facts import changes as timeline
from ..facts import mismatch as of_engine
from ..facts import relations
from ..facts import rollouts as rows
from ..facts import thresholds as t
from ..facts.conditions import SETTING
from ..facts.read_series import read_evaluations, read_series
from ..facts.recorded import AFTER, CLEAR_SD, GIVEN, RecordedChange, around, order_beside, read_recorded
from ..facts.rollouts import RepeatedResponses, Rollouts
from ..facts.series import FLAT, Fall, Outcome, Series, find_fall, find_flat, find_gap, refined
from ..statement import Measured, Statement
from ..trace.columns import read_hyperparameters
from ..trace.database import Database
from ..trace.source import Pair
from ..trace.tokens import tokens_by_step
from .settings import is_setting, suspect_of

_BREAK_STEPS, _FEWEST_STEPS = 10, 3
_ENOUGH = 20


@dataclass(frozen=True, kw_only=True)
class Facts:
    trace: str
    series: Mapping[str, Series]
    outcomes: tuple[Outcome, ...]
    fall: Fall | None
    mismatch: float | None
    """Mean |d| (nats) at the onset of the drop. See read_mismatch_size."""
    checked: CheckResult | None
    database: Database
    pair: Pair
    settings: Mapping[str, float | str]
    notes: tuple[Statement, ...]
    steps_asked: str = ALL_STEPS
    later: Fall | None = None

    @property
    def outcome(self) -> Outcome | None:
        return self.outcomes[0] if self.outcomes else None

    @property
    def has_tokens(self) -> bool:
        return bool(tokens_by_step(self.database))

    @property
    def changes(self) -> Mapping[str, tuple[timeline.ChangePoint, ...]]:
        return timeline.read_changes(self.database, self.pair)

    @cached_property
    def near(self) -> tuple[RecordedChange, ...]:
        if self.fall is None:
            return ()
        fall = self.fall
        found = around(read_recorded(self.database, self.pair), fall, len(self.steps))
        # Comparing with a baseline may have shifted the onset, so check again which changes precede it.
        ordered = (replace(change, order=order_beside(change, fall)) for change in found)
        return tuple(change for change in ordered if change.order != AFTER)

    @cached_property
    def earlier(self) -> tuple[RecordedChange, ...]:
        """Abrupt, permanent changes in inputs long before the drop. Their effect can take many updates to appear."""
        if self.fall is None:
            return ()
        near, first = {(change.series, change.step) for change in self.near}, self.steps[0]
        latest: dict[str, RecordedChange] = {}
        for change in read_recorded(self.database, self.pair):
            is_late = change.step > first + t.LEARNED * len(self.steps)
            if not is_late or change.high >= self.fall.low or change.kind not in GIVEN:
                continue
            is_slow = change.shape == "ramp" and change.kind != SETTING
            if change.abnormal >= t.OF_NO_SCATTER and not is_slow and (change.series, change.step) not in near:
                latest[change.series] = change
            else:  # an earlier change was not permanent if another one followed
                latest.pop(change.series, None)
        return tuple(latest.values())

    def clear(self, *kinds: str) -> list[RecordedChange]:
        found = [change for change in self.near if change.kind in kinds and change.abnormal >= CLEAR_SD]
        return found or [change for change in self.earlier if change.kind in kinds]

    def settings_of(self, suspect: str) -> list[RecordedChange]:
        def is_of_suspect(change: RecordedChange) -> bool:
            name = change.series
            # A logged number that rarely changes may be a measurement, e.g. the best reward so far. Keep only settings.
            is_known = name in self.settings or (suspect != "unknown" and (name in SAMPLING or is_setting(name)))
            return change.kind == SETTING and suspect_of(name) == suspect and is_known

        return [*filter(is_of_suspect, self.near)] or [*filter(is_of_suspect, self.earlier)]

    @property
    def rollouts(self) -> Rollouts:
        return rows.read_rollouts(self.database, self.pair)

    @property
    def steps(self) -> np.ndarray:
        series = next(iter(self.series.values()), None)
        return np.empty(0, np.int64) if series is None else series.steps

    def values(self, name: str) -> np.ndarray:
        series = self.series.get(name)
        return np.full(len(self.steps), np.nan) if series is None else series.values

    def at(self, name: str, step: int) -> float:
        place = int(np.searchsorted(self.steps, step))
        return float(self.values(name)[place]) if place < len(self.steps) else math.nan

    @cached_property
    def since_fall(self) -> Rollouts:
        return self.rollouts if self.fall is None else self.rollouts.since(self.breaks)

    @cached_property
    def repeated(self) -> RepeatedResponses:
        return rows.repeated_responses(self.since_fall)

    @cached_property
    def repeated_before(self) -> RepeatedResponses:
        return rows.repeated_responses(self.rollouts if self.fall is None else self.well_before)

    @cached_property
    def well_before(self) -> Rollouts:
        """Sequences from before the drop. With enough steps, only the first half of those steps is used, because the
        cause may begin before the drop."""
        before = self.steps[self.steps < self.breaks]
        return self.rollouts.until(int(before[len(before) // 2]) if len(before) >= _ENOUGH else self.breaks - 1)

    @property
    def rewards_lie_off(self) -> bool:
        return self.repeated.lies_off or self.moved_rewards is not None

    @cached_property
    def moved_rewards(self) -> dict[str, Measured] | None:
        step = self.moves.breaks("relation")
        if step is None or self.repeated.unequal <= t.CHANGED or not self.moves.policy_stays_at(step):
            return None
        return rows.moved_rewards(self.rollouts, step)

    @cached_property
    def changed_rewards(self) -> relations.ChangedResponses | None:
        if not len(self.steps):
            return None
        found = self._given_otherwise("reward", rows.least_reward(self.rollouts))
        if found is None:
            return None
        noise = self.repeated_before.unequal
        least = max(t.CHANGED + 2 * (0.0 if math.isnan(noise) else noise), t.FEW_CHANGED / found.num_responses)
        return found if found.share > least else None

    @cached_property
    def pays_length_since(self) -> float:
        found = self.changed_rewards
        if found is None:
            return 0.0
        since, before = self.rollouts.since(found.step), self.rollouts.until(found.step - 1)
        explained, direction = relations.explained_by_length(since, before)
        if explained >= t.LENGTH_EXPLAINS and len(since.step) and direction:
            return math.copysign(math.sqrt(explained), direction)
        if abs(found.length_correlation) > (t.LENGTH_EXPLAINS if found.share >= t.ALMOST_ALL else t.LENGTH_IS_ALL):
            return found.length_correlation
        if found.share < t.ALMOST_ALL:
            return 0.0
        return relations.pays_length_otherwise(since, before)

    @cached_property
    def changed_reference(self) -> relations.ChangedResponses | None:
        if self.fall is None or not np.isfinite(self.rollouts.reference).any():
            return None
        # Openings repeat more often, but whole responses are more sensitive.
        for column in ("opening_reference", "reference"):
            found = self._given_otherwise(column, t.REFERENCE_MOVES)
            if found is not None and found.share > t.MOST and not found.share_before > t.WAS_THERE * found.share:
                return found
        return None

    def _given_otherwise(self, column: str, least: float) -> relations.ChangedResponses | None:
        if self.fall is None:
            first, last = int(self.steps[0]) + 1, int(self.steps[-1])
        else:
            first, last = self.fall.interval[0] - 5, self.fall.latest
        return relations.changed_responses(self.rollouts, column, first=first, last=last, least=least)

    @cached_property
    def new_reward(self) -> relations.ChangedResponses | None:
        found = self.changed_rewards if self.fall is None else None
        if found is None or found.share < t.MOST or found.num_responses < t.FEW_CHANGED:
            return None
        return found if not rows.repeated_responses(self.rollouts.since(found.step)).unequal > t.CHANGED else None

    @cached_property
    def pays_length(self) -> float:
        """Correlation between length and reward at the onset, within groups where possible, or NaN if it is too weak."""
        near = math.inf if self.fall is None else self.fall.low + max(len(self.steps) // 10, 5)
        for part in (self.since_fall.until(near), self.since_fall):
            within = relations.relation(part, "length", "reward").correlation
            if not math.isnan(within):
                return within
        known = np.isfinite(self.since_fall.reward)
        overall = relations.correlation(self.since_fall.length[known], self.since_fall.reward[known])
        return overall if abs(overall) > t.LENGTH_EXPLAINS else math.nan

    @cached_property
    def advantages_break(self) -> int | None:
        """First step, no later than the drop, where advantages stop following rewards within groups."""
        if self.fall is None:
            return None
        steps, follows = relations.relation_by_step(self.rollouts, "reward", "advantage")
        last = int(np.searchsorted(steps, self.fall.latest, side="right"))
        for place in range(last):
            before, since = follows[max(place - _BREAK_STEPS, 0) : place], follows[place : place + _BREAK_STEPS]
            if len(before) < _FEWEST_STEPS or len(since) < _FEWEST_STEPS or np.median(before) < t.ADVANTAGE_AGREES:
                continue
            until = follows[place : max(last, place + _FEWEST_STEPS)]
            if since.max() < min(t.ADVANTAGE_FOLLOWS, float(before.min())) and np.median(until) < t.ADVANTAGE_FOLLOWS:
                return int(steps[place])
        return None

    @cached_property
    def moves(self) -> timeline.Moves:
        return timeline.NOTHING if self.fall is None else timeline.read_moves(self.series, self.rollouts, self.fall)

    @cached_property
    def breaks(self) -> int:
        if self.fall is None:
            return int(self.steps[0]) if len(self.steps) else 0
        broken = (self.moves.breaks("relation"), self.advantages_break)
        return min((step for step in broken if step is not None), default=self.fall.low)

    @cached_property
    def still_engine(self) -> of_engine.StillEngine | None:
        return of_engine.read_still_engine(self.rollouts, _mismatch_begins(self))

    @cached_property
    def earlier_weights(self) -> of_engine.EarlierWeights | None:
        return of_engine.read_earlier_weights(self.rollouts, _mismatch_begins(self))

    def beside(self, control: Facts) -> Facts:
        """Locate the drop in the difference between the run and its baseline, and return the updated facts.

        With the same seeds, this cancels the noise that both runs share.
        """
        of_control = {one.name: one for one in control.outcomes}
        pairs = {one.name: (one, of_control[one.name]) for one in self.outcomes if one.name in of_control}
        fall = self.fall
        if fall is None:
            judged = [pair for pair in pairs.values() if pair[0].is_evaluation == self.outcomes[0].is_evaluation]
            found = (find(*pair) for find in (find_flat, find_fall) for pair in judged)
            fall = next((one for one in found if one is not None), None)
            if fall is not None and fall.kind == FLAT and "reward" in pairs:
                fall = refined(fall, find_flat(*pairs["reward"]))
        elif fall.onset_of in pairs:
            gap = find_gap(*pairs[fall.onset_of])
            if gap is not None and np.ptp(gap.interval) < np.ptp(fall.interval):
                where = {name: getattr(gap, name) for name in ("step", "low", "high", "interval", "fallen", "kind")}
                fall = replace(fall, **where)
        return self if fall is None else self.with_fall(fall)

    def with_fall(self, fall: Fall) -> Facts:
        return replace(self, fall=fall, mismatch=of_engine.read_mismatch_size(self.series, fall))


def read_facts(
    database: Database, pair: tuple[str, str], *, is_control: bool = False, checked: CheckResult | None = None
) -> Facts:
    """Read a trace's facts. Runs `check` unless `is_control` is set or `checked` is given. Raises DamagedTrace."""
    name = database.given[0]
    notes: list[Statement] = []
    known, later = (database, None) if is_control else timeline.known_run(database, pair)
    series, fall = read_series(known, pair=pair), timeline.read_fall(known, pair)
    outcomes = timeline.read_outcomes(known, pair)
    if not outcomes:
        num_series = len(read_evaluations(known)) + ("reward" in series)
        values = {"min_values": timeline.MIN_VALUES, "num_series": num_series}
        notes.append(Statement(code="no_outcome", values=values))
    elif not outcomes[0].is_evaluation:
        notes.append(Statement(code="no_evaluation"))
    if checked is None and not is_control:
        checked = _checked(database, pair, name, notes)
    if (mean_abs_d := series.get("mean_abs_d")) is not None and not tokens_by_step(database) and not is_control:
        notes[-1] = Statement(code="no_tokens", values={"source": mean_abs_d.source})
    return Facts(
        trace=name, series=series, outcomes=outcomes, fall=fall, checked=checked, database=known, pair=pair,
        mismatch=of_engine.read_mismatch_size(series, fall), settings=read_hyperparameters(known),
        notes=tuple(notes), steps_asked=database.steps, later=later,
    )  # fmt: skip


def _mismatch_begins(facts: Facts) -> float:
    """Return the first step with a mismatch of at least BEGUN times its size at the onset, or infinity."""
    if facts.mismatch is None:
        return math.inf
    values = facts.values("mean_abs_d")
    begun = facts.steps[values >= t.BEGUN * max(facts.mismatch, float(np.nanmax(values)) / 10)]
    return float(min(begun, default=math.inf))


def _checked(database: Database, pair: tuple[str, str], trace: str, notes: list[Statement]) -> CheckResult | None:
    try:
        data = gather(database, pair, trace=trace)
        return judge(data, ":".join(pair), data_findings(database, data.sample))
    except NothingToCompare:
        notes.append(Statement(code="no_shared_token", values={"first_pass": pair[0], "second_pass": pair[1]}))
    except TimTraceError as error:
        notes.append(Statement(code="check_failed", values={"error": str(error)}))
    return None
