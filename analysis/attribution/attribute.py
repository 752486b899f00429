"""The cause of a collapse or a slow decline, from one run or from two."""

from __future__ import annotations

import os
from contextlib import nullcontext

from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..check.result import CheckResult
from ..statement import Statement
from ..trace.database import Database
from ..trace.pairs import parse_pair
from ..trace.source import Pair
from ..views import open_database
from . import thresholds as t
from .attribution import INTERVENTION, OBSERVATION, Attribution, NotFinite, SeriesOnset
from .control import ControlComparison, compare, shares_prompts
from .odds import ranked, weighed
from .run_facts import Facts, read_facts
from .silent import SilentChange, broken_steps, read_silent, supposed_at
from .suspect import Suspect
from .suspects import ALL
from .suspects.changed import masks, settings
from .suspects.mismatch import trainer_disagrees
from .suspects.timing import at_once, order

_NUMBERS = ("reward", "grad_norm", "loss")
"""Series that no run goes on without."""
_MOST_STEPS = 12
"""Steps of which it is asked what would be the cause if the run did worse since: each costs as much as a fall."""


def attribute(
    trace: str | os.PathLike[str] | Database,
    *,
    control: str | os.PathLike[str] | Database | None = None,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> Attribution:
    """Say whether a run collapsed or declines slowly, where that begins, what changed first, and which suspect caused it.

    An evaluation is judged where one was logged, else the reward of the sequences. Each suspect has its evidence for and
    against, a probability, and the cheapest replay or rerun that would decide. Of one run this is an observation: what
    came first need not be the cause. `control` is a run with the same seeds that differs in one thing, best with an
    exact engine; what both differ in first is then an intervention. Mismatch that follows a fall is never its cause.

    `steps` (3:80, -10:, 2:200:2) takes a part of the run, and of the control.

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
    """`attribute` of what is open already; `checked` is what check found of the run, where that is known."""
    with database.telling(progress), nullcontext() if control is None else control.telling(progress):
        facts = read_facts(database, pair, checked=checked)
        if control is None:
            silent = read_silent(facts)
            supposed = None if facts.fall or silent else _supposed(facts)
            return _attribution(facts, _suspects(facts), silent=silent, supposed=supposed)
        other = read_facts(control, pair, is_control=True)
        if shares_prompts(facts, other):
            facts = facts.beside(other)
        compared, silent = compare(facts, other, _suspects(facts)), read_silent(facts, other)
        return _attribution(
            facts, compared.suspects, silent=silent, control=control.given[0], compared=compared,
            supposed=None if facts.fall or silent else _supposed_beside(facts, other, compared),
        )  # fmt: skip


def _supposed(facts: Facts) -> SilentChange | None:
    """What would be the cause if the run did worse all the same: what was changed most clearly."""
    found = []
    for step in sorted(set(broken_steps(facts)))[:_MOST_STEPS]:
        suspects = _suspects(supposed_at(facts, step))
        if suspects[0].code != "unknown":
            found.append(SilentChange(suspects=suspects, step=step, low=step, high=step))
    return max(found, key=lambda one: one.suspects[0].probability, default=None)


def _supposed_beside(facts: Facts, control: Facts, compared: ControlComparison) -> SilentChange | None:
    """The same beside a control: what they differ in first."""
    if compared.parted is None:
        return None
    step = compared.parted.step
    supposed = supposed_at(facts, step)
    suspects = compare(supposed, control, _suspects(supposed)).suspects
    return SilentChange(suspects=suspects, step=step, low=step, high=step)


def _suspects(facts: Facts) -> tuple[Suspect, ...]:
    """Every suspect with its evidence in one run; none where nothing fell."""
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
        steps=facts.database.steps,
        control=control,
        kind=INTERVENTION if compared and compared.is_intervention else OBSERVATION,
        num_steps=len(facts.steps),
        outcome=facts.outcome.name if facts.outcome else "",
        fall=facts.fall,
        onsets=_onsets(facts),
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
    """What is NaN or infinite to the end of the run, the earliest first."""
    since = {name: facts.series[name].not_finite_since for name in _NUMBERS if name in facts.series}
    found = [NotFinite(series=name, step=step) for name, step in since.items() if step is not None]
    return tuple(sorted(found, key=lambda each: each.step))


def _new_reward(facts: Facts) -> tuple[Statement, ...]:
    """That the reward became another one, which may hide a fall; an evaluation would not be moved by it."""
    found = facts.new_reward
    if found is None or (facts.outcome is not None and facts.outcome.is_evaluation):
        return ()
    return (Statement(code="reward_changed", values=found.values),)


def _onsets(facts: Facts) -> tuple[SeriesOnset, ...]:
    """The change of each series that lies nearest to the fall, ordered by step."""
    if facts.fall is None:
        return ()
    onsets = []
    for name, changes in facts.changes.items():
        if not changes or (facts.outcome and name == facts.outcome.name):
            continue
        nearest = min(changes, key=lambda change: abs(change.step - facts.fall.step))  # type: ignore[union-attr]
        onsets.append(
            SeriesOnset(
                series=name, step=nearest.step, low=nearest.low, high=nearest.high, before=nearest.before,
                after=nearest.after, order=order(facts, nearest),
            )
        )  # fmt: skip
    return tuple(sorted(onsets, key=lambda onset: onset.step))
