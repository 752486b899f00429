"""The table of facts of a run, and of a run beside its baseline run."""

from __future__ import annotations

from .divergence import SAMPLING, Divergence, first_divergence
from .fact import Fact, fact
from .looks import beside, engine, inputs, rewards, training
from .run_facts import Facts

LOOKS = (*engine.ALL, *rewards.ALL, *training.ALL, *inputs.ALL)
"""Functions from what is recorded to facts."""


def table(facts: Facts) -> tuple[Fact, ...]:
    """Return all facts of a run with a drop, strongest first; empty without a drop."""
    if facts.fall is None:
        return ()
    return _sorted([one for look in LOOKS for one in look(facts)])


def table_beside(facts: Facts, control: Facts, known: tuple[Fact, ...]) -> tuple[tuple[Fact, ...], Divergence | None]:
    """Return the differences of a run from its baseline run, the first one first, and where the two diverge; `known` are
    the facts of the run alone."""
    parted = decisive(facts, first_divergence(facts, control)) if shares_prompts(facts, control) else None
    found = [one for look in beside.ALL for one in look(facts, control, parted)]
    found += beside.changed(facts, control, parted, known)
    if facts.fall is not None and control.fall is not None:
        found.append(fact("control_fell", control.fall.share / max(facts.fall.share, 1e-12)))
    return _sorted(found, parted.code if parted else ""), parted


def decisive(facts: Facts, parted: Divergence | None) -> Divergence | None:
    """Return the first difference if it can have caused the drop: it must not come later or be due to rounding drift."""
    if parted is None or not parted.is_sudden or (facts.fall is not None and parted.step > facts.fall.latest):
        return None
    return None if parted.code == SAMPLING and parted.num_before == 0 else parted  # other random seeds


def shares_prompts(facts: Facts, control: Facts) -> bool:
    """Return True if the first steps of both runs have the same prompts in the same order."""
    first, second = (
        run.rollouts.at_step(int(run.rollouts.step[0])).prompt if len(run.rollouts.step) else ()
        for run in (facts, control)
    )
    return len(first) == len(second) > 0 and bool((first == second).all())


def _sorted(found: list[Fact], first: str = "") -> tuple[Fact, ...]:
    known = [one for one in found if one.level]
    return tuple(sorted(known, key=lambda one: (one.code != first, -abs(one.level))))
