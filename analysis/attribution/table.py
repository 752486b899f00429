"""The table of facts of a run."""

from __future__ import annotations

from .fact import Fact
from .looks import engine, inputs, rewards, training
from .run_facts import Facts

LOOKS = (*engine.ALL, *rewards.ALL, *training.ALL, *inputs.ALL)
"""Functions from what is recorded to facts."""


def table(facts: Facts) -> tuple[Fact, ...]:
    """Return all facts of a run with a drop, strongest first; empty without a drop."""
    if facts.fall is None:
        return ()
    found = [one for look in LOOKS for one in look(facts) if one.level]
    return tuple(sorted(found, key=lambda one: -abs(one.level)))
