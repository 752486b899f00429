"""Suspect: responses are cut off before they are done."""

from __future__ import annotations

import numpy as np

from .. import thresholds as t
from ..evidence import Evidence
from ..facts import Facts
from ..next_steps import RAISE_LIMIT
from ..suspect import Suspect
from .changed import holds, settings


def truncation(facts: Facts) -> Suspect:
    """The evidence for a limit of tokens as the cause."""
    return Suspect(
        code="truncation",
        evidence=(*_cut(facts), *settings(facts, "truncation"), *holds(facts, t.WEAK), t.prior("truncation")),
        next=RAISE_LIMIT,
    )


def _cut(facts: Facts) -> list[Evidence]:
    """Lengths that responses had before and none has any more, and responses that end where they are cut."""
    if facts.fall is None:
        return []
    first, last = facts.fall.interval
    width = max(len(facts.steps) // 10, 5)
    before = facts.rollouts.until(first).since(first - 2 * width).length
    since = facts.rollouts.since(last + 1).until(last + 2 * width).length
    if not len(before) or not len(since):
        return []
    limit = float(since.max())
    values = {
        "limit": limit,
        "longer_share": float((before > limit).mean()),
        "cut_share": float((since == limit).mean()),
    }
    limited = facts.values("share_length_limited")
    is_told = bool(np.isfinite(limited).any())
    limited = limited[(facts.steps > last) & (facts.steps <= last + 2 * width) & np.isfinite(limited)]
    is_limited = len(limited) > 0 and float(limited.mean()) >= t.CUT_SHARE
    # What is cut piles up at the limit; of a policy whose responses become shorter fewer have any one length.
    is_piled = values["cut_share"] >= float((before == limit).mean())
    is_cut = min(values["longer_share"], values["cut_share"]) >= t.CUT_SHARE
    if not is_cut and is_told and is_limited:
        return _shrinks(facts, before) or [Evidence(code="responses_not_cut", points=-t.STRONG)]
    if not is_cut or not (is_limited if is_told else is_piled):
        return [Evidence(code="responses_not_cut", points=-t.STRONG)]
    # Without reasons for their end, responses of a policy that has changed may have one length, too.
    return [Evidence(code="responses_cut", values=values, points=t.CERTAIN if is_told else t.DECISIVE)]


def _shrinks(facts: Facts, before: np.ndarray) -> list[Evidence]:
    """A limit that goes on shrinking: at the end of the run responses are cut off at a length that those before passed."""
    steps = facts.steps[-max(len(facts.steps) // 10, 5) :]
    end = facts.rollouts.since(int(steps[0])).length
    limited = facts.values("share_length_limited")[-len(steps) :]
    limited = limited[np.isfinite(limited)]
    if not len(end) or not len(limited) or limited.mean() < t.CUT_SHARE:
        return []
    limit = float(end.max())
    values = {
        "step": int(steps[0]),
        "limit": limit,
        "longer_share": float((before > limit).mean()),
        "cut_share": float((end == limit).mean()),
    }
    if min(values["longer_share"], values["cut_share"]) < t.CUT_SHARE:
        return []
    return [Evidence(code="responses_cut_at_end", values=values, points=t.CERTAIN)]
