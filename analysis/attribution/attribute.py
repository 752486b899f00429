"""Find the cause of a collapse or slow decline, from one run or from a run and its baseline run."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass

from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..check.check import CheckResult
from ..statement import Statement
from ..trace.columns import parse_pair
from ..trace.database import Database
from ..trace.source import Pair
from ..views import open_database
from .advice import described
from .attribution import INTERVENTION, OBSERVATION, Attribution, Difference, NotFinite
from .divergence import SAMPLING, UPDATE
from .model import ALONE, BESIDE, judged, supported
from .run_facts import Facts, read_facts
from .silent import SilentChange, broken_steps, read_silent, supposed_at
from .suspect import Suspect
from .table import shares_prompts, table, table_beside
from .text import DIFFERENCES

_NUMBERS = ("reward", "grad_norm", "loss")
"""Series that must stay finite for a run to continue."""
_MOST_STEPS = 12
"""Maximum number of steps tested as hypothetical onsets; each takes as long as a real drop."""
_LEAST_DIFFERENCE = 0.1
"""Minimum strength of a difference from a baseline run for it to be listed."""
_SET = ("setting.", "learning_rate", "changed.setting_changed.")
"""Beginnings of features of differences that someone set, which count beside the first difference of the data."""
FELL_TOO = 0.6
"""Minimum ratio of the baseline run's relative drop to the judged run's, for the baseline run to count as collapsed too."""


def attribute(
    trace: str | os.PathLike[str] | Database,
    *,
    control: str | os.PathLike[str] | Database | None = None,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> Attribution:
    """Report whether a run collapsed or is slowly declining, when that began, what changed first, and the most likely cause.

    The outcome is an evaluation if one was logged, else the reward of the sequences. Each suspect comes with evidence for
    and against it, a probability, and the cheapest replay or rerun that would settle it. From one run it is only an
    observation: the first change need not be the cause. With `control`, a baseline run with the same seeds and one change,
    ideally with an exact engine, the first difference is an intervention. A mismatch after the drop is never its cause.

    `steps` (3:80, -10:, 2:200:2) asks about part of the run: a collapse that begins later is not reported as the
    answer. Earlier steps are still used, and so is the rest of the run if it collapses by the last selected step.

    Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    opened_control = None if control is None else open_database(control, steps)
    return explain(open_database(trace, steps), names, control=opened_control, progress=progress)


def explain(
    database: Database,
    pair: Pair,
    *,
    control: Database | None = None,
    checked: CheckResult | None = None,
    progress: Progress = no_progress,
) -> Attribution:
    """Run `attribute` on open databases; `checked` is the run's result of `check`, if available."""
    with database.telling(progress), nullcontext() if control is None else control.telling(progress):
        facts = read_facts(database, pair, checked=checked)
        if control is None:
            silent = read_silent(facts)
            return _attribution(
                facts, _alone(facts), silent=silent, supposed=None if facts.fall or silent else _supposed(facts)
            )
        other = read_facts(control.of_steps(facts.database.steps), pair, is_control=True)
        shares = shares_prompts(facts, other)
        if shares:
            facts = facts.beside(other)
        compared, silent = _compare(facts, other, shares=shares), read_silent(facts, other)
        return _attribution(
            facts, compared.suspects, silent=silent, control=control.given[0], compared=compared,
            supposed=None if facts.fall or silent else _supposed_beside(facts, other, compared),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The result of comparing a run with its baseline run."""

    suspects: tuple[Suspect, ...]
    is_intervention: bool
    differences: tuple[Difference, ...]
    notes: tuple[Statement, ...]
    step: int | None
    """Step of the first difference, if the two runs were identical until then."""


def _alone(facts: Facts) -> tuple[Suspect, ...]:
    """Return all suspects by the facts of a single run; empty if the run has no drop."""
    return () if facts.fall is None else described(facts, judged(table(facts), ALONE))


def _compare(facts: Facts, control: Facts, *, shares: bool) -> _Comparison:
    """Judge a run by its facts and its differences from a baseline run. If both collapsed, only what both share counts."""
    known = table(facts)
    found, parted = table_beside(facts, control, known)
    fell_too = facts.fall and control.fall and control.fall.share > FELL_TOO * facts.fall.share
    suspects: tuple[Suspect, ...] = ()
    if facts.fall and fell_too:
        shared = {one.feature for one in table(control)}
        suspects = judged([one for one in known if one.feature in shared], ALONE)
    elif facts.fall:
        suspects = judged((*known, *found), BESIDE)
    shown = [one for one in found if one.code in DIFFERENCES and abs(one.level) >= _LEAST_DIFFERENCE]
    differences = tuple(Difference(suspect=supported(one, BESIDE), code=one.code, values=one.values) for one in shown)
    notes = () if shares else (Statement(code="other_prompts"),)
    if facts.fall and not fell_too and not differences:
        notes = (*notes, Statement(code="no_difference"))
    of_first = [one for one in shown if parted is None or one is shown[0] or one.feature.startswith(_SET)]
    if (
        parted is not None
        and parted.code in (UPDATE, SAMPLING)
        and any(one.feature.startswith(_SET) for one in of_first)
    ):
        of_first = [
            one for one in of_first if one.feature.startswith(_SET)
        ]  # a setting acts through the update or the sampling
    codes = {supported(one, BESIDE) for one in of_first}
    return _Comparison(
        suspects=described(facts, suspects), differences=differences, notes=notes, step=None if parted is None else parted.step,
        is_intervention=shares and (facts.fall is None or len(codes) == 1),
    )  # fmt: skip


def _supposed(facts: Facts) -> SilentChange | None:
    """Return the most probable cause in case the run got worse without a visible drop, from its clearest change."""
    found = []
    for step in sorted(set(broken_steps(facts)))[:_MOST_STEPS]:
        suspects = _alone(supposed_at(facts, step))
        if suspects[0].code != "unknown":
            found.append(SilentChange(suspects=suspects, step=step, low=step, high=step))
    return max(found, key=lambda one: one.suspects[0].probability, default=None)


def _supposed_beside(facts: Facts, control: Facts, compared: _Comparison) -> SilentChange | None:
    """Return the most probable cause if the run got worse without a visible drop, judged by its first difference from a baseline run."""
    if compared.step is None:
        return None
    at = supposed_at(facts, compared.step)
    known = table(at)
    suspects = described(at, judged((*known, *table_beside(at, control, known)[0]), BESIDE))
    return SilentChange(suspects=suspects, step=compared.step, low=compared.step, high=compared.step)


def _attribution(
    facts: Facts,
    suspects: tuple[Suspect, ...],
    *,
    silent: SilentChange | None,
    supposed: SilentChange | None = None,
    control: str | None = None,
    compared: _Comparison | None = None,
) -> Attribution:
    return Attribution(
        trace=facts.trace,
        steps=facts.steps_asked,
        control=control,
        kind=INTERVENTION if compared and compared.is_intervention else OBSERVATION,
        num_steps=len(facts.steps),
        outcome=facts.outcome.name if facts.outcome else "",
        fall=facts.fall,
        later=facts.later,
        changes=facts.near,
        suspects=suspects,
        silent=silent,
        supposed=supposed,
        not_finite=_not_finite(facts),
        difference_codes=compared.differences if compared else (),
        note_codes=(
            *facts.notes,
            *(_new_reward(facts) if silent is None else ()),
            *(compared.notes if compared else ()),
        ),
    )


def _not_finite(facts: Facts) -> tuple[NotFinite, ...]:
    """Return the series that are NaN or infinite until the end of the run, earliest first."""
    since = {name: facts.series[name].not_finite_since for name in _NUMBERS if name in facts.series}
    found = [NotFinite(series=name, step=step) for name, step in since.items() if step is not None]
    return tuple(sorted(found, key=lambda each: each.step))


def _new_reward(facts: Facts) -> tuple[Statement, ...]:
    """Yield a note that a changed reward may hide a drop; not needed with an evaluation."""
    found = facts.new_reward
    if found is None or (facts.outcome is not None and facts.outcome.is_evaluation):
        return ()
    return (Statement(code="reward_changed", values=found.values),)
