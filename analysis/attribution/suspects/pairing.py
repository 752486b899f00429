"""Suspect: rewards, advantages or logprobs in the wrong rows."""

from __future__ import annotations

import math
from dataclasses import replace

from ...advice import Advice
from ...facts.moves import POLICY
from ...facts.relations import relation
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .advantages import moves_mean, of_other_sign
from .entropy import in_advantages as by_surprise
from .reference import in_advantages as by_distance

_OF_ORDER = {
    "reversed": "rewards_reversed",
    "reversed_in_groups": "rewards_reversed_in_groups",
    "members_first": "rewards_members_first",
    "groups_first": "rewards_groups_first",
    "next_in_groups": "rewards_next_in_groups",
    "previous_in_groups": "rewards_next_in_groups",
    "halves": "rewards_halves",
    "shortest_first": "rewards_by_finish",
    "longest_first": "rewards_by_finish",
    "shortest_first_in_groups": "rewards_by_finish",
    "last_step": "rewards_of_last_step",
}
"""Row order from repeats.ORDERS -> evidence code."""


def pairing(facts: Facts) -> Suspect:
    """Return the evidence for and against misaligned rows."""
    of_rewards, of_advantages = _rewards(facts), _advantages(facts)
    if any(
        each.points > 0 for each in of_advantages
    ):  # if advantages are misaligned, aligned rewards do not count against this suspect
        of_rewards = [replace(each, points=max(each.points, 0.0)) for each in of_rewards]
    evidence = [*of_rewards, *_relation(facts), *of_advantages, *_logprobs(facts)]
    return Suspect(
        code="pairing",
        evidence=(*evidence, t.prior("pairing")),
        next=Advice(
            remark="compare seq_id of rewards, advantages and logprobs where the trainer builds its batch, for one step"
        ),
    )


def _rewards(facts: Facts) -> list[Evidence]:
    repeated, graded = facts.repeated, facts.graded_elsewhere
    if graded is not None:
        measured = {
            "shift": graded.shift,
            "num_responses": graded.num_responses,
            "share": graded.equal,
            "chance_share": graded.by_chance,
        }
        return [Evidence(code="rewards_of_other_prompts", values=measured, points=t.CERTAIN)]
    if facts.sorted_in_groups is not None:
        share, before = facts.sorted_in_groups
        return [Evidence(code="rewards_sorted", values={"share": share, "before_share": before}, points=t.CERTAIN)]
    if not repeated.num_pairs:
        return []
    values = {"num_pairs": repeated.num_pairs, "unequal_share": repeated.unequal}
    if repeated.unequal <= t.UNEQUAL:
        return [Evidence(code="rewards_in_their_rows", values=values, points=-t.STRONG)]
    if repeated.lies_off:
        values |= {"unequal_shifted_share": repeated.unequal_shifted}
        if repeated.order:
            return [Evidence(code=_OF_ORDER[repeated.order], values=values, points=t.CERTAIN)]
        values |= {"shift": repeated.shift}
        return [Evidence(code="rewards_in_other_rows", values=values, points=t.CERTAIN)]
    if facts.moved_rewards is not None and not facts.reordered.is_permuted:
        kept = facts.moved_rewards
        values = {"step": kept.step, "mean_before": kept.mean_before, "mean": kept.mean}
        return [Evidence(code="rewards_move_rows", values=values, points=t.CERTAIN)]
    if facts.rewards_lie_off:
        found = facts.reordered
        values = {
            "num_responses": found.num_other,
            "num_lacking": found.num_lacking,
            "by_chance": found.lacking_by_chance,
        }
        return [Evidence(code="rewards_reordered", values=values, points=t.CERTAIN)]
    return []


def _relation(facts: Facts) -> list[Evidence]:
    """Detect rewards that lose their relation to likelihood at a step while their distribution and the policy are
    unchanged."""
    moves = facts.moves
    step = moves.breaks("relation")
    if step is None or moves.moves_at(step, "reward", "mean_abs_d", *POLICY):
        return []
    return [Evidence(code="relation_breaks_alone", values={"step": step}, points=t.STRONG)]


def _advantages(facts: Facts) -> list[Evidence]:
    """Detect advantages that do not follow rewards within groups."""
    correlation = relation(facts.since_fall, "reward", "advantage").by_group
    if facts.advantages_break is not None:
        correlation = facts.advantages_break[2]
    least = t.ADVANTAGE_FOLLOWS if facts.rollouts.is_alone else t.ADVANTAGE_AGREES
    if math.isnan(correlation) or correlation >= least or correlation <= t.INVERTED_ADVANTAGES:
        return []
    if of_other_sign(facts):
        return []
    # A critic's residual need not follow the reward of a changed policy. Misalignment leaves the mean unchanged.
    is_of_term = by_distance(facts) or by_surprise(facts)
    points = 0.0 if is_of_term else t.WEAK if moves_mean(facts) else t.STRONG if facts.rollouts.is_alone else t.CERTAIN
    return [Evidence(code="advantages_do_not_follow", values={"correlation": correlation}, points=points)]


def _logprobs(facts: Facts) -> list[Evidence]:
    code = facts.checked.findings[0].code if facts.checked else None
    if code == "row_pairing":
        return [Evidence(code="logprobs_in_other_rows", points=t.CERTAIN)]
    if facts.scored_rows is not None:
        return [Evidence(code="logprobs_of_other_rows", values=facts.scored_rows.values, points=t.CERTAIN)]
    return []
