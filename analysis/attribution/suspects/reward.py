"""Suspect: rewards that are noise, or that pay for the wrong thing."""

from __future__ import annotations

import math

from ...advice import Advice
from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from ..rollouts import changed_rewards, relation
from .length import pays


def reward(facts: Facts) -> Suspect:
    """What speaks for a noisy or wrong reward."""
    evidence = [*_noise(facts), *_changed(facts), *_direction(facts), *_hidden(facts), *_dropped(facts)]
    return Suspect(
        code="reward",
        evidence=(*evidence, t.prior("reward")),
        next=Advice(
            remark="score the recorded responses of the steps around the fall again with the verifier, and compare with "
            "sequences.reward",
        ),
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
    if found.negative > t.INVERTED or found.by_group < t.AGAINST:
        return [
            Evidence(
                sentence=f"where the fall begins the likelier answers earn less in {found.negative:.0%} of the groups "
                f"(mean correlation {found.by_group:.2f}), as if the reward were inverted",
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


def _dropped(facts: Facts) -> list[Evidence]:
    """What the same answers earn changes at once; a policy that changes answers otherwise."""
    drop = facts.drop
    if drop is None or not drop.is_of_reward:
        return []
    return [
        Evidence(
            sentence=f"the reward loses {min(drop.share, 1.0):.0%} of the fall at step {drop.step}, where entropy, length and "
            "likelihood stay what they were: the same answers earn less",
            points=t.DECISIVE,
        )
    ]


def _hidden(facts: Facts) -> list[Evidence]:
    """An evaluation that falls while the reward does not."""
    if facts.reward_beside is None or facts.fall is None or facts.outcome is None:
        return []
    before, after = facts.reward_beside
    if facts.hides:
        paid = pays(facts)
        return [
            Evidence(
                sentence=f"the recorded reward goes from {before:.3g} to {after:.3g} while {facts.outcome.name} falls "
                f"from {facts.fall.before:.3g} to {facts.fall.after:.3g}: it pays for "
                + ("length" if paid else "something else"),
                points=0.0 if paid else t.STRONG,
            )
        ]
    return [Evidence(sentence="the recorded reward falls with the evaluation", points=-t.WEAK)]
