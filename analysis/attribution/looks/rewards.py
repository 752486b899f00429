"""Facts about rewards, their rows, advantages and response length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...facts import thresholds as ft
from ...facts.conditions import ADVANTAGES
from ...facts.moves import POLICY
from ...facts.relations import relation
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from .order import AFTER, order
from .training import nearness, values_of

_ORDERS = {
    "members_first": "rewards_members_first", "groups_first": "rewards_groups_first", "halves": "rewards_halves",
    "next_in_groups": "rewards_next_in_groups", "previous_in_groups": "rewards_next_in_groups",
    "shortest_first": "rewards_by_finish", "longest_first": "rewards_by_finish", "shortest_first_in_groups": "rewards_by_finish",
    "last_step": "rewards_of_last_step", "reversed": "rewards_reversed", "reversed_in_groups": "rewards_reversed_in_groups",
}  # fmt: skip
"""Row order from repeats.ORDERS -> code of the fact."""
_FEWEST_STEPS = 5
"""Minimum number of steps before a drop for the usual size of advantages to be known."""


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def repeats(facts: Facts) -> Iterator[Fact]:
    """Yield how often identical responses get different rewards, since the drop and before it."""
    found, before = facts.repeated, _known(facts.repeated_before.unequal)
    if not found.num_pairs:
        return
    values = {"num_pairs": found.num_pairs, "unequal_share": found.unequal}
    if found.unequal > 0.01 and not facts.rewards_lie_off:
        grown = max(found.unequal - before, 0.0) / max(found.unequal, 1e-12)
        yield fact("rewards_noisy", math.sqrt(found.unequal) * grown, mean_difference=found.mean_difference, **values)
    since, usual = (_known(value) for value in facts.unequal_in_step)
    if since > usual and not facts.rewards_lie_off:
        yield fact(
            "rewards_disagree_in_step", math.sqrt(since) * (since - usual) / since, share=since, before_share=usual
        )


def in_other_rows(facts: Facts) -> Iterator[Fact]:
    """Yield rewards that belong to other rows or other prompts."""
    found, graded = facts.repeated, facts.graded_elsewhere
    if graded is not None:
        values = {"shift": graded.shift, "num_responses": graded.num_responses, "share": graded.equal}
        yield fact("rewards_of_other_prompts", 1.0, kind="in_other_rows", chance_share=graded.by_chance, **values)
    elif facts.sorted_in_groups is not None:
        share, before = facts.sorted_in_groups
        yield fact("rewards_sorted", 1.0, kind="in_other_rows", share=share, before_share=before)
    elif found.num_pairs and found.lies_off:
        code = _ORDERS[found.order] if found.order else "rewards_in_other_rows"
        values = {"num_pairs": found.num_pairs, "unequal_share": found.unequal, "shift": found.shift}
        yield fact(code, 1.0, kind="in_other_rows", unequal_shifted_share=found.unequal_shifted, **values)
    elif facts.moved_rewards is not None and not facts.reordered.is_permuted:
        kept = facts.moved_rewards
        yield fact(
            "rewards_move_rows", 1.0, kind="in_other_rows", step=kept.step, mean_before=kept.mean_before, mean=kept.mean
        )
    elif facts.rewards_lie_off:
        other = facts.reordered
        yield fact("rewards_reordered", 1.0, kind="in_other_rows", num_responses=other.num_other, num_lacking=other.num_lacking, by_chance=other.lacking_by_chance)  # fmt: skip


def changed(facts: Facts) -> Iterator[Fact]:
    """Yield identical responses whose reward changes at a step, and whether their length explains it."""
    found = facts.changed_rewards
    if found is None or facts.rewards_lie_off:
        return
    if by_length := facts.pays_length_since:
        yield fact("length_pays_since", abs(by_length), correlation=by_length, **{name: found.values[name] for name in ("step", "num_responses")})  # fmt: skip
        return
    within, before = (_known(value) for value in facts.unequal_in_step)
    is_of_response = within <= 0.01 and before <= 0.01
    yield fact("rewards_of_other_rule" if is_of_response else "rewards_changed", math.sqrt(found.share), **found.values)


def likelihood(facts: Facts) -> Iterator[Fact]:
    """Yield how reward relates to likelihood at the onset, and before it; training on the reward makes better answers likelier."""
    assert facts.fall is not None
    now, usual = (
        relation(part, "likelihood", "reward") for part in (facts.around_fall(), facts.rollouts.until(facts.breaks - 1))
    )
    if math.isnan(now.by_group):
        return
    values = {"correlation": now.by_group, "negative_share": now.negative}
    if not math.isnan(usual.by_group):
        yield fact("likelier_earned_more", usual.by_group - now.by_group, "lost", correlation=now.by_group, correlation_before=usual.by_group)  # fmt: skip
        yield fact("likelier_earn_less", max(now.negative - usual.negative, 0.0), "share", **values)


def alone(facts: Facts) -> Iterator[Fact]:
    """Yield rewards that change at a step, or lose their relation to likelihood, without a change of policy or engine."""
    moves = facts.moves
    reward, broken = moves.step("reward"), moves.breaks("relation")
    first = min((step for step in (reward, broken) if step is not None), default=None)
    if first is not None and not moves.moves_at(first, "mean_abs_d", *POLICY):
        group = "beside_input" if facts.is_given_otherwise else ""
        if reward is None or reward > first + 1:
            yield fact("relation_breaks_alone", 1.0, group, step=first)
        elif broken is not None and broken <= reward + 1:
            yield fact("reward_and_relation_move", 1.0, group, step=first)
        else:
            yield fact("reward_moves_alone", 1.0, group, step=first)


def hidden(facts: Facts) -> Iterator[Fact]:
    """Yield whether the recorded reward drops with the evaluation, and rewards beyond their earlier range."""
    assert facts.fall is not None
    if facts.is_held_out:
        yield fact("evaluation_holds", 1.0)
    before, since = (part.reward[np.isfinite(part.reward)] for part in (facts.well_before, facts.since_fall))
    if len(before) and len(since) and np.ptp(before) > 0:
        share = float((since > before.max() + 0.2 * np.ptp(before)).mean())
        values = {"share": share, "highest_before": float(before.max()), "highest": float(since.max())}
        yield fact("rewards_beyond_range", math.sqrt(share), **values)
    if facts.reward_beside is None or facts.outcome is None:
        return
    of_reward, fall = facts.reward_beside, facts.fall
    lost = (of_reward[0] - of_reward[1]) / max(abs(of_reward[0]), 1e-12) / max(fall.share, 1e-12)
    values = {
        "outcome_before": fall.before,
        "outcome_after": fall.after,
        "reward_before": of_reward[0],
        "reward_after": of_reward[1],
    }
    if lost < 0.3:
        yield fact("reward_hides_fall", float(np.tanh(0.5 - lost)), "with", outcome=facts.outcome.name, **values)


def advantages(facts: Facts) -> Iterator[Fact]:
    """Yield how advantages follow rewards within groups, since the drop and before."""
    since = facts.since_fall
    if (broken := facts.advantages_break) is not None:
        since = facts.rollouts.since(broken[0])
        yield fact(
            "advantages_turn",
            broken[1] - broken[2],
            step=broken[0],
            correlation_before=broken[1],
            correlation=broken[2],
        )
    now = relation(since, "reward", "advantage").by_group
    if math.isnan(now):
        return
    usual = _known(relation(facts.rollouts.until(facts.breaks - 1), "reward", "advantage").by_group)
    same_size = _known(relation(since, "reward_size", "advantage_size").by_group)
    if now < 0:
        yield fact("advantages_inverted", -now * max(usual, 0.2), correlation=now)
    lacking = max(usual - now, 0.0)
    if same_size >= 0.9:
        yield fact("advantages_of_other_sign", lacking, correlation=now)
    elif now > -0.3:
        yield fact("advantages_do_not_follow", lacking, "alone" if facts.rollouts.is_alone else "", correlation=now)


def _mean_and_sd(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known.mean()), float(known.std())) if len(known) else (0.0, 0.0)


def sizes(facts: Facts) -> Iterator[Fact]:
    """Yield advantages that lose a sign, change their mean or scale, or burst."""
    assert facts.fall is not None
    before, since = facts.rollouts.until(facts.fall.low - 1), facts.since_fall
    a, b = (part.advantage[np.isfinite(part.advantage)] for part in (before, since))
    if len(a) < 20 or len(b) < 20:
        return
    negative, now, positive = float((a < 0).mean()), float((b < 0).mean()), float((b > 0).mean())
    level = (
        min(negative * 4, 1.0)
        * max(1 - now / max(negative, 1e-12), 0.0) ** 2
        * min(positive * 4, 1.0)
        * min(_known(since.share_below_group) * 4, 1.0)
    )
    yield fact("advantages_one_sided", level, before_share=negative, negative_share=now)
    near, last = facts.rollouts.since(facts.fall.low).until(facts.fall.latest + 5), before.since(facts.fall.low - 10)
    (mean, scatter), (mean_now, _) = (_mean_and_sd(part.advantage) for part in (last, near))
    reward = _mean_and_sd(near.reward)[0] - _mean_and_sd(last.reward)[0]
    moved = mean_now - mean
    # A slow baseline lets the mean move by up to the reward's change, divided by its spread if advantages are normalised.
    by_reward = abs(reward) * max(1.0, scatter / max(_mean_and_sd(last.reward)[1], 1e-9)) if scatter else 0.0
    early = facts.well_before
    means = [_mean_and_sd(early.advantage[early.step == step])[0] for step in np.unique(early.step)]
    if scatter and np.ptp(means) < 0.01 * scatter:  # a baseline within groups keeps the mean at 0, whatever the reward
        by_reward = 0.0
        for change in facts.clear(ADVANTAGES):
            if change.series == "advantage_mean":
                far = abs(float(change.after) - float(change.before))
                yield fact(
                    "advantages_changed",
                    nearness(facts, change) * far / (far + 0.1 * scatter),
                    "mean",
                    **values_of(change),
                )
    own = max(abs(moved) - by_reward, 0.0)
    values = {"low": facts.fall.low, "high": facts.fall.latest, "step": facts.fall.step}
    yield fact("advantages_changed", float(np.tanh(own / scatter)) if scatter else 0.0, "mean", series="advantage_mean", from_value=mean, to_value=mean_now, **values)  # fmt: skip
    steps, first = np.unique(facts.rollouts.step, return_index=True)
    largest = np.fmax.reduceat(np.abs(facts.rollouts.advantage), first)
    earlier, around = (
        largest[steps < facts.fall.interval[0] - ft.AHEAD],
        (steps >= facts.fall.interval[0] - ft.AHEAD) & (steps <= facts.fall.interval[1]),
    )
    if len(earlier) >= _FEWEST_STEPS and around.any():
        at = np.flatnonzero(around)[int(np.nanargmax(np.nan_to_num(largest[around])))]
        place = {"step": int(steps[at]), "low": int(steps[at]), "high": int(steps[at])}
        yield fact("advantages_changed", max(of_ratio(float(largest[at]), float(np.nanmax(earlier)), 30.0), 0.0), "burst", series="max_abs_advantage", from_value=float(np.nanmax(earlier)), to_value=float(largest[at]), **place)  # fmt: skip


def length(facts: Facts) -> Iterator[Fact]:
    """Yield how response length changes, and whether rewards pay for it."""
    assert facts.fall is not None
    changes, paid = facts.changes.get("length", ()), _known(facts.pays_length)
    if changes and paid and order(facts, changes[0]) != AFTER:
        far = max(changes, key=lambda each: abs(math.log(max(each.after, 1e-9) / max(changes[0].before, 1e-9))))
        level = paid * of_ratio(far.after, changes[0].before, 3.0)
        values = {"before": changes[0].before, "after": far.after, "step": changes[0].step}
        yield fact("length_pays" if paid > 0 else "length_costs", level, "moves", correlation=paid, **values)
    if facts.rewards_by_length is not None:
        before, share = facts.rewards_by_length
        yield fact("length_explains_rewards", share - before, before_share=before, share=share)


ALL = (repeats, in_other_rows, changed, likelihood, alone, hidden, advantages, sizes, length)
