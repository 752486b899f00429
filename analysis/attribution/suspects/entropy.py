"""Suspect: the policy loses its entropy, or gains too much of it, and nothing else explains that."""

from __future__ import annotations

import numpy as np

from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from .timing import AFTER, falls, order, rises


def entropy(facts: Facts) -> Suspect:
    """What speaks for entropy as the cause."""
    evidence = _moves(facts) if "entropy" in facts.series else []
    return Suspect(
        code="entropy",
        evidence=(*evidence, t.prior("entropy")),
        next="rerun with the sign and size of the entropy term changed (or a higher clip bound, clip_high 0.28)",
    )


def _moves(facts: Facts) -> list[Evidence]:
    values = facts.values("entropy")
    known = values[np.isfinite(values)]
    if len(known) < 9 or facts.fall is None:
        return []
    first = float(np.median(known[: max(len(known) // 20, 3)]))
    end = int(np.searchsorted(facts.steps[np.isfinite(values)], facts.fall.high, side="right"))
    at_fall = known[: max(end, 1)]
    low, high = float(at_fall.min()), float(at_fall.max())
    if low < t.ENTROPY_LOST * first:
        moved, changes = f"entropy falls from {first:.3g} to {low:.3g} nats", falls(facts, "entropy")
    elif high > t.ENTROPY_GAINED * first:
        moved, changes = f"entropy rises from {first:.3g} to {high:.3g} nats", rises(facts, "entropy")
    else:
        return [Evidence(sentence="entropy is in its range when the fall begins", points=-t.STRONG)]
    if changes and order(facts, changes[0]) == AFTER:
        return [Evidence(sentence=f"{moved}, after the fall began", points=-t.MEDIUM)]
    return [Evidence(sentence=f"{moved} before the fall or with it", points=t.MEDIUM)]
