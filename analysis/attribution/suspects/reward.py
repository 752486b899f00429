"""Suspect: rewards that are noise, or that pay for the wrong thing."""

from __future__ import annotations

import math

import numpy as np

from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from ..rollouts import changed_rewards, relation


def reward(facts: Facts) -> Suspect:
    """What speaks for a noisy or wrong reward."""
    evidence = [*_noise(facts), *_changed(facts), *_direction(facts), *_hidden(facts)]
    return Suspect(
        code="reward",
        evidence=(*evidence, t.prior("reward")),
        next="score the recorded responses of the steps around the fall again with the verifier, and compare with "
        "sequences.reward",
    )


def _noise(facts: Facts) -> list[Evidence]:
    found = facts.repeats
    if not found.num_pairs:
        return []
    if found.unequal <= t.UNEQUAL:
        return [
            Evidence(
                sentence=f"the reward is a matter of the response: of {found.num_pairs:,} repeated responses "
                f"{found.unequal:.1%} have two rewards",
                points=-t.WEAK,
            )
        ]
    if found.lies_off:
        return []
    return [
        Evidence(
            sentence=f"{found.unequal:.0%} of {found.num_pairs:,} repeated responses to the same prompt have two "
            f"rewards, {found.mean_gap:.2g} apart",
            points=t.DECISIVE * min(1.0, found.unequal / t.MUCH_UNEQUAL),
        )
    ]


def _changed(facts: Facts) -> list[Evidence]:
    """The same response earns something else since the fall."""
    if facts.fall is None:
        return []
    num, share = changed_rewards(facts.rollouts.until(facts.fall.low - 1), facts.rollouts.since(facts.fall.high))
    if math.isnan(share) or share <= t.CHANGED:
        return []
    if facts.repeats.lies_off:
        return []
    return [
        Evidence(
            sentence=f"of {num:,} responses that came before the fall and after it {share:.0%} earn another reward since",
            points=t.DECISIVE,
        )
    ]


def _direction(facts: Facts) -> list[Evidence]:
    """A policy that knows something gives its better answers more probability, until it has learnt the opposite."""
    found = relation(facts.around_fall(), "likelihood", "reward")
    if math.isnan(found.by_group):
        return []
    if found.negative > t.INVERTED:
        return [
            Evidence(
                sentence=f"where the fall begins the likelier answers earn less in {found.negative:.0%} of the groups, as "
                "if the reward were inverted",
                points=t.STRONG,
            )
        ]
    if found.by_group < t.NO_DIRECTION:
        return [
            Evidence(
                sentence=f"where the fall begins likelier answers earn no more (correlation {found.by_group:.2f} within "
                "groups), as if the reward did not look at them",
                points=t.WEAK,
            )
        ]
    return [
        Evidence(
            sentence=f"where the fall begins likelier answers earn more (correlation {found.by_group:.2f} within groups)",
            points=-t.WEAK,
        )
    ]


def _hidden(facts: Facts) -> list[Evidence]:
    """An evaluation that falls while the reward does not."""
    if facts.outcome is None or not facts.outcome.is_evaluation or facts.fall is None:
        return []
    values = facts.values("reward")
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 9:
        return []
    fell_at = facts.fall.step
    before = values[known[facts.steps[known] <= max(fell_at, facts.steps[known[2]])]][
        -max(len(known) // 10, 3) :
    ].mean()
    after = values[known[-max(len(known) // 10, 3) :]].mean()
    lost = (before - after) / max(abs(before), 1e-12)
    if lost < t.HIDDEN * facts.fall.share:
        paid = facts.pays_length > t.LENGTH_PAYS
        return [
            Evidence(
                sentence=f"the recorded reward goes from {before:.3g} to {after:.3g} while {facts.outcome.name} falls "
                f"from {facts.fall.before:.3g} to {facts.fall.after:.3g}: it pays for "
                + ("length" if paid else "something else"),
                points=0.0 if paid else t.STRONG,
            )
        ]
    return [Evidence(sentence="the recorded reward falls with the evaluation", points=-t.WEAK)]
