"""Suspect: rewards that are noise, or that pay for the wrong thing."""

from __future__ import annotations

import math

import numpy as np

from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from ..rollouts import relation, repeats


def reward(facts: Facts) -> Suspect:
    """What speaks for a noisy or wrong reward."""
    evidence = [*_noise(facts), *_direction(facts), *_hidden(facts)]
    return Suspect(
        code="reward",
        evidence=(*evidence, t.prior("reward")),
        next="score the recorded responses of the steps around the fall again with the verifier, and compare with "
        "sequences.reward",
    )


def _noise(facts: Facts) -> list[Evidence]:
    found = repeats(facts.rollouts)
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
    if found.shift and found.unequal_shifted < t.UNEQUAL_SHIFTED * found.unequal:
        return []
    return [
        Evidence(
            sentence=f"{found.unequal:.0%} of {found.num_pairs:,} repeated responses to the same prompt have two "
            f"rewards, {found.mean_gap:.2g} apart",
            points=t.DECISIVE * min(1.0, found.unequal / t.MUCH_UNEQUAL),
        )
    ]


def _direction(facts: Facts) -> list[Evidence]:
    """A policy that knows something gives its better answers more probability, until it has learnt the opposite."""
    early = facts.rollouts.until(int(facts.steps[max(len(facts.steps) // 5 - 1, 0)])) if len(facts.steps) else None
    whole = relation(facts.rollouts, "likelihood", "reward")
    if early is None or math.isnan(whole.correlation):
        return []
    first = relation(early, "likelihood", "reward")
    negative = max(whole.negative_prompts, 0.0 if math.isnan(first.negative_prompts) else first.negative_prompts)
    if negative > t.NEGATIVE_PROMPTS:
        return [
            Evidence(
                sentence=f"of {negative:.0%} of the prompts the likelier answers earn less, as if the reward were inverted",
                points=t.STRONG,
            )
        ]
    if not math.isnan(first.correlation) and first.correlation < t.NO_DIRECTION:
        return [
            Evidence(
                sentence=f"from the start likelier answers earn no more (correlation {first.correlation:.2f} within "
                "groups), as if the reward did not look at them",
                points=t.MEDIUM,
            )
        ]
    return []


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
        paid = relation(facts.rollouts, "length", "reward").correlation > t.LENGTH_PAYS
        return [
            Evidence(
                sentence=f"the recorded reward goes from {before:.3g} to {after:.3g} while {facts.outcome.name} falls "
                f"from {facts.fall.before:.3g} to {facts.fall.after:.3g}: it pays for "
                + ("length" if paid else "something else"),
                points=0.0 if paid else t.STRONG,
            )
        ]
    return [Evidence(sentence="the recorded reward falls with the evaluation", points=-t.WEAK)]
