"""Suspect: the sign, the scale or the baseline of the advantages is wrong."""

from __future__ import annotations

import math

from ...dynamics.recorded import RecordedChange
from .. import thresholds as t
from ..evidence import Evidence
from ..facts import Facts
from ..next_steps import COMPUTE_ADVANTAGES
from ..rollouts import relation
from ..suspect import Suspect
from .changed import changed, holds, settings


def advantages(facts: Facts) -> Suspect:
    """The evidence for advantages that are wrong in themselves."""
    return Suspect(
        code="advantages",
        evidence=(
            *(_inverted(facts) or _changed(facts)), *settings(facts, "advantages"), *holds(facts, -t.STRONG),
            t.prior("advantages"),
        ),
        next=COMPUTE_ADVANTAGES,
    )  # fmt: skip


def _inverted(facts: Facts) -> list[Evidence]:
    """Advantages that go down where rewards go up."""
    correlation = relation(facts.since_fall, "reward", "advantage").by_group
    if math.isnan(correlation) or correlation > t.INVERTED_ADVANTAGES:
        return []
    return [Evidence(code="advantages_inverted", values={"correlation": correlation}, points=t.CERTAIN)]


def _changed(facts: Facts) -> list[Evidence]:
    found = [change for change in facts.clear("advantages") if _is_large(change, facts)]
    if found:
        return [changed("advantages_changed", found[0], t.DECISIVE)]
    return [Evidence(code="advantages_steady", points=-t.MEDIUM)]


def _is_large(change: RecordedChange, facts: Facts) -> bool:
    """Whether a change of the advantages is one that rewards do not make."""
    before, after = float(change.before), float(change.after)
    if change.series == "advantage_scale":
        return abs(math.log(max(after, 1e-12) / max(before, 1e-12))) > math.log(t.RESCALED)
    if change.series == "advantage_mean":
        spread = float(facts.rollouts.until(change.low).advantage.std()) if len(facts.rollouts.step) else 0.0
        return abs(after - before) > t.MOVED_BASELINE * max(spread, 1e-12)
    return change.series == "advantage_correlation" and after < t.ADVANTAGE_FOLLOWS < before
