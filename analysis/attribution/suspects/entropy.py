"""Suspect: the policy loses its entropy, or gains too much of it, and nothing else explains that."""

from __future__ import annotations

import numpy as np

from ...advice import Advice
from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from .timing import AFTER, order, rises


def entropy(facts: Facts) -> Suspect:
    """What speaks for entropy as the cause."""
    evidence = [*_moves(facts), *_pushed(facts)] if "entropy" in facts.series else []
    return Suspect(
        code="entropy",
        evidence=(*evidence, t.prior("entropy")),
        next=Advice(
            remark="rerun with the sign and size of the entropy term changed (or a higher clip bound, clip_high 0.28)"
        ),
    )


def _moves(facts: Facts) -> list[Evidence]:
    values = facts.values("entropy")
    known = np.isfinite(values)
    steps, values = facts.steps[known], values[known]
    if len(values) < 9 or facts.fall is None:
        return []
    width = max(len(values) // 20, 3)
    # The first values alone: what explodes does so within a few steps.
    first, last = float(np.median(values[:3])), float(np.median(values[-width:]))
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    at_fall = float(smooth[min(int(np.searchsorted(steps, facts.fall.low)), len(smooth) - 1)])
    said = f"entropy goes from {first:.3g} over {at_fall:.3g} where the fall begins to {last:.3g} nats"
    if at_fall > t.ENTROPY_GAINED * first:
        return [Evidence(sentence=f"{said}: it rose before the fall", points=t.STRONG)]
    if last < t.ENTROPY_LOST * first:
        # Who unlearns grows unsure; who grows surer while the reward falls was pushed to it.
        return [Evidence(sentence=f"{said}: the policy grows surer while it does worse", points=t.STRONG)]
    if last < t.ENTROPY_SHRUNK * min(first, at_fall):
        return [Evidence(sentence=f"{said}: the policy grows surer while it does worse", points=t.MEDIUM)]
    if last > t.ENTROPY_GAINED**2 * first and any(order(facts, each) != AFTER for each in rises(facts, "entropy")):
        return [Evidence(sentence=f"{said}: it explodes with the fall", points=t.STRONG)]
    if last > t.ENTROPY_GAINED * first:
        return [Evidence(sentence=f"{said}: it rises with the fall or after it", points=0.0)]
    return [Evidence(sentence=f"{said}: it stays in its range", points=-t.STRONG)]


def _pushed(facts: Facts) -> list[Evidence]:
    """Large updates move entropy, too."""
    values = facts.values("update_to_weight")
    known = values[np.isfinite(values)]
    if not len(known) or float(np.median(known[: max(len(known) // 5, 1)])) < t.LARGE_UPDATE:
        return []
    return [Evidence(sentence="updates are large, which moves entropy as well", points=-t.WEAK)]
