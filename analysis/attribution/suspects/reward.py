"""Suspect: a noisy or wrong reward."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...advice import Advice
from ...facts.moves import POLICY
from ...facts.relations import relation
from ...statement import Measured
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import of_changed, settings
from .length import pays

_SHOWN = ("rewards_of_other_rule", "rewards_disagree_in_step")
"""Evidence codes from individual responses, which override evidence from trends against this suspect."""


def reward(facts: Facts) -> Suspect:
    """Return the evidence for and against a noisy or wrong reward."""
    evidence = [
        *_noise(facts), *_changed(facts), *_direction(facts), *_hidden(facts), *_dropped(facts), *_moves(facts), *_beyond(facts), *settings(facts, "reward"),
    ]  # fmt: skip
    if any(each.code in _SHOWN for each in evidence):
        evidence = [replace(each, points=max(each.points, 0.0)) for each in evidence]
    return Suspect(
        code="reward",
        evidence=(*evidence, t.prior("reward")),
        next=Advice(
            remark="score the recorded responses of the steps around the drop again with the verifier, and compare with "
            "sequences.reward"
        ),
    )


def _noise(facts: Facts) -> list[Evidence]:
    repeated = facts.repeated
    if not repeated.num_pairs:
        return []
    values = {"num_pairs": repeated.num_pairs, "unequal_share": repeated.unequal}
    if repeated.unequal <= t.UNEQUAL:
        return [Evidence(code="rewards_deterministic", values=values, points=-t.WEAK)]
    if facts.rewards_lie_off:
        return []
    since, before = facts.unequal_in_step
    if since >= t.DISAGREE and before <= t.AGREE:
        return [
            Evidence(code="rewards_disagree_in_step", values={"share": since, "before_share": before}, points=t.CERTAIN)
        ]
    if facts.repeated_before.unequal > t.WAS_THERE * repeated.unequal:
        return [Evidence(code="rewards_noisy_before", values=values, points=0.0)]
    values |= {"mean_difference": repeated.mean_difference}
    points = t.DECISIVE * min(1.0, repeated.unequal / t.MUCH_UNEQUAL)
    return [Evidence(code="rewards_noisy", values=values, points=points)]


def _changed(facts: Facts) -> list[Evidence]:
    """Detect identical responses that get a different reward after the onset."""
    found = facts.changed_rewards
    if found is None or facts.rewards_lie_off or facts.pays_length_since:
        return []
    since, before = facts.unequal_in_step
    is_of_response = since <= t.AGREE and not before > t.AGREE and found.share >= t.OTHER_RULE
    code = "rewards_of_other_rule" if is_of_response else "rewards_changed"
    return [Evidence(code=code, values=found.values, points=of_changed(found))]


def _direction(facts: Facts) -> list[Evidence]:
    """Return evidence from how reward relates to likelihood; training on the reward makes better answers likelier."""
    likelihood = relation(facts.around_fall(), "likelihood", "reward")
    if math.isnan(likelihood.by_group):
        return []
    values = {"correlation": likelihood.by_group, "negative_share": likelihood.negative}
    if likelihood.by_group < t.AGAINST or (likelihood.negative > t.INVERTED and likelihood.by_group < t.NO_DIRECTION):
        return [Evidence(code="likelier_earn_less", values=values, points=t.STRONG)]
    if likelihood.by_group < t.NO_DIRECTION:
        return [Evidence(code="likelier_earn_no_more", values=values, points=t.WEAK)]
    return [Evidence(code="likelier_earn_more", values=values, points=-t.MEDIUM)]


def _dropped(facts: Facts) -> list[Evidence]:
    """Detect a reward that drops abruptly although the policy is unchanged."""
    drop = facts.drop
    if drop is None or not drop.is_of_reward or facts.is_given_otherwise:
        return []
    return [Evidence(code="reward_drops_without_policy", values=drop.values, points=t.DECISIVE)]


def _moves(facts: Facts) -> list[Evidence]:
    """Detect rewards that change at a step while policy and engine do not."""
    moves = facts.moves
    reward, relation_step = moves.step("reward"), moves.breaks("relation")
    if (
        relation_step is not None
        and (reward is None or relation_step < reward)
        and moves.moves_at(relation_step, "reward")
    ):
        reward = relation_step
    first = min((step for step in (reward, relation_step) if step is not None), default=None)
    if first is None or moves.moves_at(first, "mean_abs_d", *POLICY) or facts.is_given_otherwise:
        return []
    if reward is None or reward > first:
        return [Evidence(code="relation_breaks_alone", values={"step": first}, points=t.WEAK)]
    if relation_step is not None and relation_step <= reward + 1:
        return [Evidence(code="reward_and_relation_move", values={"step": first}, points=t.STRONG)]
    return [Evidence(code="reward_moves_alone", values={"step": first}, points=t.MEDIUM)]


def _beyond(facts: Facts) -> list[Evidence]:
    """Detect rewards above the earlier maximum."""
    if facts.fall is None:
        return []
    before, since = (part.reward for part in (facts.well_before, facts.since_fall))
    before, since = before[np.isfinite(before)], since[np.isfinite(since)]
    if not len(before) or not len(since) or np.ptp(before) == 0:
        return []
    share = float((since > before.max() + t.BEYOND_RANGE * np.ptp(before)).mean())
    if share < t.MANY_BEYOND or _is_of_length(facts):
        return []
    values = {"share": share, "highest_before": float(before.max()), "highest": float(since.max())}
    return [Evidence(code="rewards_beyond_range", values=values, points=t.DECISIVE)]


def _is_of_length(facts: Facts) -> bool:
    """Return True if rewards depend on length; then the suspect is `length`."""
    return pays(facts) or bool(facts.pays_length_since) or facts.rewards_by_length is not None


def _hidden(facts: Facts) -> list[Evidence]:
    """Detect an evaluation that drops while the reward does not."""
    if facts.reward_beside is None or facts.fall is None or facts.outcome is None:
        return []
    before, after = facts.reward_beside
    values: dict[str, Measured] = {
        "outcome": facts.outcome.name, "outcome_before": facts.fall.before, "outcome_after": facts.fall.after,
        "reward_before": before, "reward_after": after,
    }  # fmt: skip
    if not facts.hides:
        return [Evidence(code="reward_falls_too", values=values, points=-t.STRONG)]
    if _is_of_length(facts):
        return [Evidence(code="reward_hides_fall_pays_length", values=values, points=0.0)]
    if facts.mismatch is not None and facts.mismatch.size >= t.APART / 2:
        return [Evidence(code="reward_hides_fall_of_other_policy", values=values, points=0.0)]
    rises = after - before > t.PAID_MORE * max(abs(before), 1e-12)
    return [Evidence(code="reward_hides_fall", values=values, points=t.DECISIVE if rises else t.STRONG)]
