"""Suspect: a reward that depends on response length."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from ...advice import Advice
from ...facts import thresholds as ft
from ...facts.changes import ChangePoint
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import holds, of_changed, settings
from .timing import AFTER, order


def length(facts: Facts) -> Suspect:
    """Return the evidence for and against response length as the cause."""
    paid = _pays(facts)
    moves = _moves(facts, t.LENGTH_MOVES_PAID if pays(facts) else t.LENGTH_MOVES)
    if any(
        each.code in ("length_pays_since", "length_explains_rewards") for each in paid
    ):  # stronger evidence than constant lengths
        moves = [replace(each, points=max(each.points, 0.0)) for each in moves]
    return Suspect(
        code="length",
        evidence=(
            *moves,
            *paid,
            *settings(facts, "length"),
            *holds(facts, -t.MEDIUM),
            t.prior("length"),
        ),
        next=Advice(
            f"tim-trace query by-length {shlex.quote(facts.trace)}",
            "then rerun with a penalty for overlong responses or a larger max_tokens",
        ),
    )


def pays(facts: Facts) -> bool:
    """Return True if the reward clearly pays for length, or weakly in the direction of change while it hides a drop.

    Lengths that change against the correlation have another cause.
    """
    change = _first_move(facts, t.LENGTH_MOVES)
    way = 0.0 if change is None or order(facts, change) == AFTER else math.copysign(1.0, change.after - change.before)
    if way * facts.pays_length < 0:
        return False
    return facts.pays_length > ft.LENGTH_PAYS or (facts.hides and way * facts.pays_length > ft.LENGTH_PAYS / 2)


def _first_move(facts: Facts, least: float) -> ChangePoint | None:
    """Return the first change after which lengths differ from the initial ones by more than a factor of `least`."""
    changes = facts.changes.get("length", ())
    return next(
        (
            change
            for change in (replace(each, before=changes[0].before) for each in changes)
            if abs(math.log(max(change.after, 1e-9) / max(change.before, 1e-9))) > math.log(least)
        ),
        None,
    )


def _moves(facts: Facts, least: float) -> list[Evidence]:
    first = _first_move(facts, least)
    if first is None:
        return [Evidence(code="length_steady", points=-t.STRONG)]
    values = {"before": first.before, "after": first.after, "step": first.step}
    if order(facts, first) == AFTER:
        return [Evidence(code="length_changes_after_fall", values=values, points=-t.WEAK)]
    return [Evidence(code="length_changes", values=values, points=t.WEAK)]


def _pays(facts: Facts) -> list[Evidence]:
    found = facts.changed_rewards
    if found is not None and facts.pays_length_since:
        values = {"correlation": facts.pays_length_since, "step": found.step, "num_responses": found.num_responses}
        return [Evidence(code="length_pays_since", values=values, points=t.CERTAIN)]
    if facts.rewards_by_length is not None:
        before_share, share = facts.rewards_by_length
        points = t.CERTAIN if share >= t.LENGTH_NEARLY_ALL else t.DECISIVE
        values = {"before_share": before_share, "share": share}
        return [Evidence(code="length_explains_rewards", values=values, points=points)]
    if not pays(facts):
        return []
    values = {"correlation": facts.pays_length}
    is_clear = facts.pays_length > ft.LENGTH_PAYS
    evidence = [Evidence(code="length_pays", values=values, points=t.DECISIVE)] if is_clear else []
    if not is_clear or (facts.hides and _first_move(facts, t.LENGTH_MOVES) is not None):
        code = "length_pays_while_hidden" if facts.pays_length > 0 else "length_costs_while_hidden"
        evidence.append(Evidence(code=code, values=values, points=t.STRONG))
    if found is not None and found.is_of_one_length and not facts.rewards_lie_off:
        # If all responses are equally long, a reward for length looks like any other change of the reward.
        evidence.append(Evidence(code="rewards_changed", values=found.values, points=of_changed(found)))
    return evidence
