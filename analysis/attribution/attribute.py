"""Find the cause of a collapse or slow decline, from one run or from a run and its baseline run."""

from __future__ import annotations

import os
from contextlib import nullcontext

from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..check.check import CheckResult
from ..statement import Statement
from ..trace.columns import parse_pair
from ..trace.database import Database
from ..trace.source import Pair
from ..views import open_database
from . import thresholds as t
from .attribution import INTERVENTION, OBSERVATION, Attribution, NotFinite
from .control import ControlComparison, compare, shares_prompts
from .odds import ranked, weighed
from .run_facts import Facts, read_facts
from .silent import SilentChange, broken_steps, read_silent, supposed_at
from .suspect import Suspect
from .suspects import ALL
from .suspects.changed import masks, settings
from .suspects.mismatch import trainer_disagrees
from .suspects.timing import at_once

_NUMBERS = ("reward", "grad_norm", "loss")
"""Series that must stay finite for a run to continue."""
_MOST_STEPS = 12
"""Maximum number of steps tested as hypothetical onsets; each takes as long as a real drop."""


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
            supposed = None if facts.fall or silent else _supposed(facts)
            return _attribution(facts, _suspects(facts), silent=silent, supposed=supposed)
        other = read_facts(control.of_steps(facts.database.steps), pair, is_control=True)
        if shares_prompts(facts, other):
            facts = facts.beside(other)
        compared, silent = compare(facts, other, _suspects(facts)), read_silent(facts, other)
        return _attribution(
            facts, compared.suspects, silent=silent, control=control.given[0], compared=compared,
            supposed=None if facts.fall or silent else _supposed_beside(facts, other, compared),
        )  # fmt: skip


def _supposed(facts: Facts) -> SilentChange | None:
    """Return the most probable cause in case the run got worse without a visible drop, from its clearest change."""
    found = []
    for step in sorted(set(broken_steps(facts)))[:_MOST_STEPS]:
        suspects = _suspects(supposed_at(facts, step))
        if suspects[0].code != "unknown":
            found.append(SilentChange(suspects=suspects, step=step, low=step, high=step))
    return max(found, key=lambda one: one.suspects[0].probability, default=None)


def _supposed_beside(facts: Facts, control: Facts, compared: ControlComparison) -> SilentChange | None:
    """Return the same as `_supposed`, from the first difference between the run and a baseline run."""
    if compared.parted is None:
        return None
    step = compared.parted.step
    supposed = supposed_at(facts, step)
    suspects = compare(supposed, control, _suspects(supposed)).suspects
    return SilentChange(suspects=suspects, step=step, low=step, high=step)


def _suspects(facts: Facts) -> tuple[Suspect, ...]:
    """Return all suspects with the evidence from this run alone; empty if the run has no drop."""
    if facts.fall is None:
        return ()
    unknown = Suspect(
        code="unknown",
        evidence=(
            *settings(facts, "unknown"),
            *at_once(facts, t.MEDIUM),
            *trainer_disagrees(facts),
            *masks(facts),
            t.prior("unknown"),
        ),
    )
    return ranked([weighed(suspect) for suspect in (*(suspect(facts) for suspect in ALL), unknown)])


def _attribution(
    facts: Facts,
    suspects: tuple[Suspect, ...],
    *,
    silent: SilentChange | None,
    supposed: SilentChange | None = None,
    control: str | None = None,
    compared: ControlComparison | None = None,
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
