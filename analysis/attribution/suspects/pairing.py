"""Suspect: rewards, advantages or logprobs are handed to the wrong rows."""

from __future__ import annotations

import math

from ...advice import Advice
from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from ..rollouts import relation


def pairing(facts: Facts) -> Suspect:
    """What speaks for data that is paired wrongly."""
    evidence = [*_rewards(facts), *_advantages(facts), *_logprobs(facts)]
    return Suspect(
        code="pairing",
        evidence=(*evidence, t.prior("pairing")),
        next=Advice(
            remark="compare seq_id of rewards, advantages and logprobs where the trainer builds its batch, for one step"
        ),
    )


def _rewards(facts: Facts) -> list[Evidence]:
    found = facts.repeats
    if not found.num_pairs:
        return []
    if found.lies_off and found.unequal > t.UNEQUAL:
        return [
            Evidence(
                sentence=f"{found.unequal:.0%} of {found.num_pairs:,} repeated responses have two rewards; moved by "
                f"{found.shift} rows within the step it is {found.unequal_shifted:.0%}",
                points=t.CERTAIN,
            )
        ]
    if found.unequal <= t.UNEQUAL:
        return [
            Evidence(
                sentence=f"{found.num_pairs:,} repeated responses have the same reward each time "
                f"({found.unequal:.1%} differ)",
                points=-t.MEDIUM,
            )
        ]
    return []


def _advantages(facts: Facts) -> list[Evidence]:
    """Within a group the advantage rises with the reward, whatever it is divided by."""
    found = relation(facts.since_fall, "reward", "advantage").by_group
    if math.isnan(found):
        return []
    if found < (t.ADVANTAGE_FOLLOWS if facts.rollouts.is_alone else t.ADVANTAGE_AGREES):
        return [
            Evidence(
                sentence=f"within groups advantages do not follow rewards (correlation {found:.2f}; a baseline "
                "and a scale leave it at 1)",
                points=t.CERTAIN,
            )
        ]
    return []


def _logprobs(facts: Facts) -> list[Evidence]:
    code = facts.checked.findings[0].code if facts.checked else None
    if code != "row_pairing":
        return []
    return [Evidence(sentence="check finds logprobs of the two passes in each other's rows", points=t.CERTAIN)]
