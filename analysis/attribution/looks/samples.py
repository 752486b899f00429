from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ...check.finding import DataFinding
from ...facts import thresholds as t
from ...facts.conditions import ADVANTAGES, PROMPTS
from ...facts.recorded import AFTER, GIVEN, order_beside
from ...facts.relations import relation
from ...facts.rollouts import other_endings, unequal_in_step
from ...facts.series import FLAT, MISMATCH, Fall
from ...statement import Measured
from ..fact import Fact, fact, of_ratio, strongest
from ..run_facts import Facts
from .training import nearness, values_of

_FEWEST_STEPS = 5
DATA_FAULTS = {
    "reward": "rewards_constant rewards_by_prompt rewards_unequal rewards_differ rewards_weighted rewards_of_nothing",
    "pairing": "rewards_of_other_rows",
    "advantages": "advantages_unrelated advantages_inverted advantages_constant advantages_unequal advantages_mixed advantages_clipped advantages_unsigned "
    "advantages_scaled advantages_extreme advantages_unlike_settings advantages_misplaced advantages_of_equal baseline "
    "baseline_unknown groups_mix_prompts prompts_split one_row_groups rows_alone rows_lost",
    "length": "advantages_by_length penalty_missing",
    "truncation": "limit_exceeded limit_contradicts finish_contradicts tokens_after_end padding_counts mask_cuts finished_masked end_missing",
    "data": "batch_repeats prompts_restart prompt_padding",
    "reference": "reference_is_policy reference_apart",
}
"""Suspect -> `check` codes of the data faults that point to the suspect."""


def data_faults_since(facts: Facts) -> Iterator[tuple[str, int, DataFinding]]:
    """For each data fault that `check` finds, yield the suspect, the first faulty step and the finding."""
    for suspect, codes in DATA_FAULTS.items():
        for one in facts.checked.data if facts.checked else ():
            if not one.is_notice and one.code in codes.split():
                yield suspect, int(facts.steps[0]) if one.since is None else one.since, one


def data_faults(facts: Facts, fall: Fall) -> Iterator[Fact]:
    """For each suspect, yield the strongest data fault from `check` that begins no later than the drop."""
    found = defaultdict[str, list[Fact]](list)
    for suspect, since, one in data_faults_since(facts):
        if since <= fall.latest:
            level = math.sqrt(one.share) * nearness(facts, since)
            found[suspect].append(fact("data_fault", level, suspect, finding=one.title, step=since))
    yield from (max(each, key=lambda one: one.level) for each in found.values())


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def repeats(facts: Facts, _: Fall) -> Iterator[Fact]:
    if facts.rewards_lie_off:
        return
    found, before = facts.repeated, _known(facts.repeated_before.unequal)
    if found.unequal > 0.01:  # NaN if no response is repeated
        level = math.sqrt(found.unequal) * (max(found.unequal - before, 0.0) / found.unequal)
        values = {"num_pairs": found.num_pairs, "unequal_share": found.unequal}
        yield fact("rewards_noisy", level, mean_difference=found.mean_difference, **values)
    within, between = unequal_in_step(facts.since_fall)
    if between > within:  # False if either is NaN
        values = {"within_groups_share": within, "between_groups_share": between}
        yield fact("rewards_differ_by_group", between - within, **values)


def in_other_rows(facts: Facts, _: Fall) -> Iterator[Fact]:
    found = facts.repeated
    if found.num_pairs and found.lies_off:
        values: dict[str, Measured] = {"num_pairs": found.num_pairs, "unequal_share": found.unequal}
        values |= {"order": found.order, "unequal_ordered_share": found.unequal_ordered}
        yield fact("rewards_in_other_rows", 1.0, "", "in_other_rows", **values)
    elif facts.moved_rewards is not None:
        yield fact("rewards_move_rows", 1.0, "", "in_other_rows", **facts.moved_rewards)


def changed(facts: Facts, _: Fall) -> Iterator[Fact]:
    found = facts.changed_rewards
    if found is None or facts.rewards_lie_off:
        return
    if by_length := facts.pays_length_since:
        values = {"step": found.step, "num_responses": found.num_responses}
        yield fact("length_pays_since", abs(by_length), correlation=by_length, **values)
    else:
        yield fact("rewards_changed", math.sqrt(found.share), **found.values)


def alone(facts: Facts, _: Fall) -> Iterator[Fact]:
    moves = facts.moves
    reward, broken = moves.step("reward"), moves.breaks("relation")
    first = min((step for step in (reward, broken) if step is not None), default=None)
    if first is not None and moves.policy_stays_at(first):
        is_given = any(change.shape != "ramp" for change in facts.clear(*GIVEN))
        is_given |= any(change.series == "mean_abs_d" for change in facts.clear(MISMATCH))
        if reward is None or reward > first + 1:
            code = "relation_breaks_alone"
        else:
            both = broken is not None and broken <= reward + 1
            code = "reward_and_relation_move" if both else "reward_moves_alone"
        yield fact(code, 1.0, "beside_input" if is_given else "", step=first)


def hidden(facts: Facts, fall: Fall) -> Iterator[Fact]:
    reward = facts.values("reward")
    known = np.flatnonzero(np.isfinite(reward))
    if fall.kind == FLAT or fall.share <= 0 or len(known) < 9:  # a supposed drop has no known size
        return
    if facts.outcome is None or not facts.outcome.is_evaluation:
        return
    width = max(len(known) // 10, 3)
    until = known[facts.steps[known] <= max(fall.step, facts.steps[known[2]])]
    before, after = float(reward[until][-width:].mean()), float(reward[known[-width:]].mean())
    lost = (before - after) / max(abs(before), 1e-12) / max(fall.share, 1e-12)
    if lost < 0.3:
        values = {"outcome_before": fall.before, "outcome_after": fall.after}
        values |= {"reward_before": before, "reward_after": after}
        yield fact("reward_hides_fall", float(np.tanh(0.5 - lost)), "with", outcome=facts.outcome.name, **values)


def starts(facts: Facts, _: Fall) -> Iterator[Fact]:
    """Report whether the first rewards are lower than the first evaluation of the same policy."""
    if facts.outcome is None or not facts.outcome.is_evaluation:
        return
    early = facts.steps <= facts.outcome.steps[0] + 2
    rewards = facts.values("reward")[early & np.isfinite(facts.values("reward"))]
    if not len(rewards) or early.mean() > 0.2:
        return
    first, given = float(facts.outcome.values[0]), float(rewards.mean())
    if first > 0 and 0 <= given < first:
        yield fact("reward_starts_below", of_ratio(first, max(given, first / 100), 10.0), outcome=facts.outcome.name,
                   reward=given, evaluated=first)  # fmt: skip


def advantages(facts: Facts, _: Fall) -> Iterator[Fact]:
    since = facts.since_fall if facts.advantages_break is None else facts.rollouts.since(facts.advantages_break)
    now = relation(since, "reward", "advantage").by_group
    if math.isnan(now):
        return
    usual = relation(facts.rollouts.until(facts.breaks - 1), "reward", "advantage").by_group
    if now < 0:
        yield fact("advantages_inverted", -now * (1.0 if math.isnan(usual) else max(usual, 0.2)), correlation=now)
    usual = _known(usual)
    lacking = max(usual - now, 0.0)
    if _known(relation(since, "reward_size", "advantage_size").by_group) >= 0.9:
        yield fact("advantages_of_other_sign", lacking, correlation=now)
    elif now > -0.3:
        yield fact("advantages_do_not_follow", lacking, "alone" if facts.rollouts.is_alone else "", correlation=now)


def _mean_and_sd(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known.mean()), float(known.std())) if len(known) else (0.0, 0.0)


def sizes(facts: Facts, fall: Fall) -> Iterator[Fact]:
    before, since = facts.rollouts.until(fall.low - 1), facts.since_fall
    a, b = (part.advantage[np.isfinite(part.advantage)] for part in (before, since))
    if len(a) < 20 or len(b) < 20:
        return
    near, last = facts.rollouts.since(fall.low).until(fall.latest + 5), before.since(fall.low - 10)
    (mean, scatter), (mean_now, _) = (_mean_and_sd(part.advantage) for part in (last, near))
    reward = _mean_and_sd(near.reward)[0] - _mean_and_sd(last.reward)[0]
    moved = mean_now - mean
    # If the baseline adapts slowly, the mean advantage changes along with the mean reward (divided by the rewards'
    # standard deviation if advantages are normalised). A change of that size does not count.
    by_reward = abs(reward) * max(1.0, scatter / max(_mean_and_sd(last.reward)[1], 1e-9)) if scatter else 0.0
    early = facts.well_before
    means = [_mean_and_sd(early.advantage[early.step == step])[0] for step in np.unique(early.step)]
    if scatter and np.ptp(means) < 0.01 * scatter:  # group baselines keep the mean advantage at 0
        by_reward = 0.0
        for change in facts.clear(ADVANTAGES):
            if change.series == "advantage_mean":
                far = abs(float(change.after) - float(change.before))
                level = nearness(facts, change.high) * far / (far + 0.1 * scatter)
                yield fact("advantages_changed", level, "mean", **values_of(change))
    own = max(abs(moved) - by_reward, 0.0)
    level = float(np.tanh(own / scatter)) if scatter else 0.0
    values: dict[str, Measured] = {"low": fall.low, "high": fall.latest, "step": fall.step}
    values |= {"from_value": mean, "to_value": mean_now}
    yield fact("advantages_changed", level, "mean", series="advantage_mean", **values)
    steps, first = np.unique(facts.rollouts.step, return_index=True)
    largest = np.fmax.reduceat(np.abs(facts.rollouts.advantage), first)
    first_near = fall.interval[0] - t.AHEAD
    earlier, around = largest[steps < first_near], (steps >= first_near) & (steps <= fall.interval[1])
    if len(earlier) >= _FEWEST_STEPS and around.any():
        at = np.flatnonzero(around)[int(np.nanargmax(np.nan_to_num(largest[around])))]
        step, usual, burst = int(steps[at]), float(np.nanmax(earlier)), float(largest[at])
        values = {"step": step, "low": step, "high": step, "from_value": usual, "to_value": burst}
        level = max(of_ratio(burst, usual, 30.0), 0.0)
        yield fact("advantages_changed", level, "burst", series="max_abs_advantage", **values)


def length(facts: Facts, fall: Fall) -> Iterator[Fact]:
    changes, paid = facts.changes.get("length", ()), _known(facts.pays_length)
    if changes and paid and order_beside(changes[0], fall) != AFTER:
        far = max(changes, key=lambda each: abs(math.log(max(each.after, 1e-9) / max(changes[0].before, 1e-9))))
        level = paid * of_ratio(far.after, changes[0].before, 3.0)
        values = {"before": changes[0].before, "after": far.after, "step": changes[0].step}
        yield fact("length_pays" if paid > 0 else "length_costs", level, "moves", correlation=paid, **values)


_MATERIAL = {"share_new_prompts": 0.2, "prompt_form_shift": 0.02}
"""Change at which a fact has half its full strength. Much smaller changes hardly count."""


@strongest
def prompts(facts: Facts, _: Fall) -> Iterator[Fact]:
    changes = [change for change in (*facts.near, *facts.earlier) if change.kind == PROMPTS]
    for change in changes:
        beside = [one for one in changes if abs(one.step - change.step) <= 1 and one.shape == "shift"]
        abnormal = math.hypot(*(min(abs(one.size_in_sd or 50.0), 50.0) for one in (beside or [change])))
        far = abs(float(change.after) - float(change.before))
        usual = _MATERIAL.get(change.series)
        is_new = change.series == "share_new_places" and change.before == 0
        level = (
            nearness(facts, change.high) * abnormal / (abnormal + 8.0) * (1.0 if usual is None else far / (far + usual))
        )
        level *= 0.4 if change.shape == "ramp" and not is_new else 1.0
        yield fact("prompts_changed", level, **values_of(change))


def endings(facts: Facts, fall: Fall) -> Iterator[Fact]:
    steps = np.unique(facts.rollouts.step)
    if not len(steps):
        return
    before = facts.rollouts.until(min(fall.interval[0] - int(t.AHEAD) - 1, int(steps[len(steps) // 5])))
    first = len(np.unique(before.step))
    last = min(int(np.searchsorted(steps, fall.latest, "right")), len(steps) - 2)
    if first < 3 or last <= first:
        return
    rows = facts.rollouts
    shares = {
        "endings_change": other_endings(rows, before),
        "stop_ignored": rows.by_step(rows.goes_on.astype(float)),
        "never_ended": rows.by_step((~rows.is_ended).astype(float)),
        "rows_left_out": rows.by_step(((rows.length == 0) & (rows.num_tokens > 0)).astype(float)),
    }
    for code, (steps, share) in shares.items():
        usual = np.array([np.median(share[max(at - 10, 0) : at]) for at in range(first, last)])
        jumps = np.array([share[at : at + 3].min() for at in range(first, last)]) - 4 * usual
        at = int(np.argmax(jumps > 0.5 * jumps.max())) if jumps.max() > 0 else 0
        step, level = int(steps[first + at]), max(float(jumps.max()), 0.0)
        if code != "never_ended":  # a policy that breaks down forgets some of its end tokens, too
            level = math.sqrt(level)
        values = {"step": step, "share": float(share[first + at]), "before_share": float(usual[at])}
        yield fact(code, level * nearness(facts, step), **values)


@strongest
def capped(facts: Facts, fall: Fall) -> Iterator[Fact]:
    """Report whether responses suddenly end at a length that many earlier responses exceeded."""
    steps, first = np.unique(facts.rollouts.step, return_index=True)
    parts = np.split(facts.rollouts.num_tokens, first[1:])
    longest = np.array([part.max(initial=0) for part in parts])
    # Count only responses without an end token: a policy can learn to end all responses at one length, but only a limit
    # cuts them off.
    ended = np.split(facts.rollouts.is_ended, first[1:])
    for at in range(3, min(int(np.searchsorted(steps, fall.latest, "right")), len(steps) - 3)):
        limit = longest[at : at + _FEWEST_STEPS].max()
        longer = [float((part > limit).mean()) for part in parts[at - 3 : at]]
        share = min(float(((parts[step] == limit) & ~ended[step]).mean()) for step in range(at, at + 3))
        values = {"step": int(steps[at]), "limit": int(limit), "share": share, "before_share": longer[-1]}
        yield fact("responses_capped", min(share, *longer), **values)


ALL = (
    data_faults, repeats, in_other_rows, changed, alone, hidden, starts, advantages, sizes, length, prompts,
    endings, capped,
)  # fmt: skip
