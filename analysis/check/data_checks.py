"""Check a run's rewards, advantages, groups, prompts, settings, logged metrics and importance ratios.

Faults here can ruin training even if the two passes are comparable.

Shapes: N rows (sequences) in the run or in one step, S steps, E steps with a logged value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.loss import read_loss
from ...schemas.passes import CURRENT, REFERENCE, REPLAY_PREFIX, ROLLOUT, TRAIN
from ...schemas.steps import ALL_STEPS
from ...schemas.tables import SAMPLING
from ..trace.columns import attempts, scored_passes
from ..trace.database import Database
from ..trace.ragged import array_of, flat
from . import advantages, metrics, token_checks
from .advantages import CLOSE, KL_IN_REWARD, TINY, DataRows, count_of, mean_of, numbered, rms_of, shifted, split_steps
from .faults import evidence_text
from .faults.kinds import BY_TIME, MIN_STOPPED
from .faults.misplaced import LAGS, MIN_OFF_NATS, REALIGNED_SHARE, find_placement
from .faults.sampling import MAX_LEFT, find_one_sided, find_temperature, unapplied_setting
from .features import FEW, MIN_REPEATS, means, movement, not_repeatable, pearson, repeats, wrong_versions
from .finding import BY_GROUP, BY_STEP, BY_VERSION, DataFault, DataFinding, data_fault
from .pair_data import MIN_REST, PairData, allowed_noise, level, logit_error, neighbours
from .sample import CHANCE, PairSums, PassSample, Sample, read_sample
from .where import PLACE_NATS, places, where_text


def data_findings(database: Database, sample: Sample | None) -> tuple[DataFinding, ...]:
    """Check rewards, advantages, groups and metrics at the selected steps, and tokens only at `sample`'s steps."""
    run = DataRows(database, sample)
    found: dict[str, DataFinding] = {}
    if len(run.at):
        checks = (
            _values, _rewards, _groups, advantages.check_advantages, _returns, _turns, _repeats, _texts, _unlike_lengths, _restarts, metrics.check_metrics, _ratios,
            _reference, _versions, _reward_parts, _penalties, _kl_penalty, _kl_of_nothing, _kl_that_grows, _settings, _cut_prompts,
        )  # fmt: skip
        found |= {finding.code: finding for check in checks for finding in check(run)}
        if sample is not None and len(sample.tokens):
            found |= {finding.code: finding for finding in token_checks.check_tokens(run, sample)}
    faults = {code for code, finding in found.items() if not finding.is_notice}
    fault_of = {code: FAULTS[code, finding.signal] for code, finding in found.items()}
    kept = [
        finding for code, finding in found.items()
        if (found.keys() if finding.is_notice else faults).isdisjoint(fault_of[code].hidden_by)
    ]  # fmt: skip
    return tuple(
        sorted(kept, key=lambda each: (each.is_notice, each.is_notice and fault_of[each.code].is_often_intended))
    )


_NOT_FINITE = data_fault("not_finite", "NaN or infinite {column}", "{num:,} values of {column} are NaN or infinite{case}", "SELECT step, seq_id, {column} FROM {rows} WHERE NOT isfinite({column}) ORDER BY step", cases={
    "values": "", "spread": ": {are_all} of each {scope} in which a row's {source}{with_reward} is NaN or infinite",
}, is_often_intended=True, are_all={True: "all rows", False: "rows"}, with_reward=", and with it the reward,")  # fmt: skip
_MISPLACED = data_fault("advantages_misplaced", "advantages do not cover the whole response", "in {num:,} rows, {case}", cases={
    "zeros": "all tokens have the same advantage, except that the {end} {num_zeros:.3g} tokens (median) have 0{are_continued}",
    "mask": "{num_zeros:,.0f} tokens in the loss have advantage 0, and {num_masked:,.0f} masked tokens do not, as if another row's mask had been applied",
}, hidden_by=("advantages_mixed",), are_continued="; a later turn continues each of these rows")  # fmt: skip
_EXTREME = data_fault("advantages_extreme", "extreme advantages", "|advantage| reaches {largest:.4g} ({usual:.3g} is usual), and no baseline or normalisation gives more than {bound:.3g}{are_equal}", BY_STEP, hidden_by=("advantages_scaled", "baseline"), are_equal="; the other rewards in the group are equal, so these advantages were probably divided by a standard deviation that is only a rounding error")  # fmt: skip


def _values(run: DataRows) -> Iterator[DataFinding]:
    rows, by_token = run.rows, run.rows["is_per_token"]
    if (lost := rows["lost_reward"]).any():
        yield from run.find(_NOT_FINITE, lost, signal="values", column="reward", notice=_are_excluded(run, lost))
    if (lost := rows["lost_advantage"]).any():
        source = _nan_source(run, lost)
        yield from run.find(_NOT_FINITE, lost, signal="spread" if source else "values", column="advantage", **source)
    for end in ("first", "last"):
        zeros = rows[f"zeros_{end}"]
        misplaced = by_token & (zeros > 0) & (zeros == rows["num_zero"])
        least = 1 + max(by_token.sum(), 8) // 2
        zeros_there = float(np.median(zeros[misplaced])) if misplaced.any() else 0.0
        numbers: dict[str, Any] = {"end": end, "num_zeros": zeros_there}
        numbers["are_continued"] = bool(misplaced.any() and np.isin(np.flatnonzero(misplaced), run.continued[0]).all())
        yield from run.find(_MISPLACED, misplaced, signal="zeros", least=least, **numbers)
    swapped = (rows["masked"] > 0) & (rows["loss_zeros"] > 0)
    numbers = {"num_zeros": rows["loss_zeros"][swapped].sum(), "num_masked": rows["masked"][swapped].sum()}
    yield from run.find(_MISPLACED, swapped, signal="mask", least=3, **numbers)
    # A value normalised over n values is at most sqrt(n), and a reward minus a baseline is at most the range of
    # rewards. An advantage can exceed both bounds only if its row is left out of its own normalisation.
    highest = np.abs(rows["reward"][np.isfinite(rows["reward"])]).max(initial=0.0)
    size, units = np.nan_to_num(rows["largest"], posinf=0), np.where(by_token, rows["length"], 1.0)
    bound = 2 * np.maximum(np.sqrt(np.bincount(run.at, units)), 2 * highest)[run.at]
    usual = [np.median(part[part > 0]) for part in split_steps(run.at, size) if part.any()]
    bound = np.fmax(bound, 2 * np.abs(run.left_out))
    with np.errstate(all="ignore"):  # the group's mean may be near 0
        by_mean = np.abs(rows["reward"] / mean_of(run.cell, rows["reward"]) - 1)
        varied = (by_mean > TINY) & np.isfinite(by_mean)
        if np.isclose(size, by_mean, rtol=CLOSE)[varied].sum() > 0.9 * varied.sum():
            bound = np.fmax(bound, 2 * by_mean)
    extreme = (size > bound) & (size > 10 * np.quantile(usual or [0.0], 0.25))
    numbers = {"largest": float(size.max()), "usual": float(np.quantile(usual or [0.0], 0.25))}
    is_known = (count_of(run.cell) > 2) & (mean_of(run.cell, 1.0 * np.isfinite(rows["reward"])) == 1)
    are_equal = bool((is_known & np.isnan(run.left_out))[extreme].all())
    yield from run.find(_EXTREME, extreme, bound=bound, are_equal=are_equal, **numbers)


def _are_excluded(run: DataRows, lost: np.ndarray) -> bool:
    """Return True if training excludes the rows with a `lost` reward ([N] bool), but not the rest of their groups."""
    cell = run.cell
    trains = (run.rows["loss_length"] > 0) & (np.nan_to_num(run.rows["advantage"], nan=1.0) != 0)
    reward = np.where(lost, 0.0, run.rows["reward"])
    mean = mean_of(cell, reward) / np.maximum(mean_of(cell, 1.0 * ~lost), TINY)
    varies = mean_of(cell, ~lost * np.abs(reward - mean)) > TINY
    is_whole = mean_of(run.at, 1.0 * lost) == 1
    return not (trains[lost].any() or is_whole.any() or (lost & varies & (mean_of(cell, 1.0 * trains) == 0)).any())


def _nan_source(run: DataRows, lost: np.ndarray) -> dict[str, Any]:
    """Describe the NaN rewards in the groups or steps of `lost` advantages ([N] bool). Empty if some have none."""
    names, parts, is_given = run.parts
    lost_reward, sources = run.rows["lost_reward"], dict[tuple[str, bool], np.ndarray]()
    for name, values in zip(names, parts.T, strict=True):
        if (is_nan := is_given & ~np.isfinite(values)).any():
            sources[name, bool(lost_reward[is_nan].all())] = is_nan
    sources["reward", False] = lost_reward
    cells = {"group": run.cell, "step": run.at}
    for ((name, with_reward), is_nan), (scope, cell) in itertools.product(sources.items(), cells.items()):
        reached = (mean_of(cell, 1.0 * is_nan) > 0) & ((run.labels > 0) | (scope == "step"))
        if reached[lost].all() and (mean_of(cell, 1.0 * lost)[reached] > 0).all():
            are_all = bool((lost == reached).all())
            return {"source": name, "with_reward": with_reward, "scope": scope, "are_all": are_all}
    return {}


_TURNS_DIFFER = data_fault("turns_differ", "turns of a trajectory get different advantages", "{num:,} rows have different advantages from the rows that continue them{are_zero}", are_zero=": those of earlier turns are 0")  # fmt: skip


def _turns(run: DataRows) -> Iterator[DataFinding]:
    """Find turns whose advantage differs from a later turn's, although only the last has a reward, or all have the same."""
    row, later = run.continued
    is_alone = count_of(numbered(run.rows["response"], run.at)) == 1  # identical rows may continue differently
    row, later = (rows[is_alone[row] & is_alone[later]] for rows in (row, later))
    reward = np.nan_to_num(run.rows["reward"])
    if run.is_per_token or (reward[row].any() and not np.array_equal(reward[row], reward[later])):
        return
    first, second = (run.rows["advantage"][rows] for rows in (row, later))
    differs = np.abs(first - second) > 1e-3 * np.abs(np.nan_to_num(second)).max(initial=0.0)
    yield from run.find(_TURNS_DIFFER, differs, rows=row, are_zero=not first[differs].any(), notice=True)


_FAILED = re.compile("error|abort|time_?d?_?out|fail|cancel|exception|crash")
"""Finish reasons of rollouts that no verifier could judge."""


def _stuck(run: DataRows, rewards: np.ndarray) -> tuple[np.ndarray, bool] | None:
    """Return the rows ([N] bool) from the step on at which all `rewards` ([N]) are equal, and whether that step is the
    first one. None if chance explains it, or a policy that earns the maximum from some step on."""
    known = np.isfinite(rewards)
    value = rewards[known][-1]
    later = known & (run.at > run.at[known & (rewards != value)].max(initial=-1))
    earlier = rewards[known & ~later]
    # Only distinct responses are evidence: a collapsed policy repeats one response and always earns the same reward.
    num_later = len(np.unique(run.rows["answer"][later & (run.rows["response"] > 0)]))
    usual = (1 + (earlier == value).sum()) / (2 + len(earlier))
    is_solved = len(earlier) and value == rewards[known].max()
    return None if num_later * np.log(usual) >= CHANCE or is_solved else (later, not len(earlier))


_REWARDS_CONSTANT = data_fault("rewards_constant", "constant rewards", "every reward{start} is {value:g}, so there is nothing to learn", BY_STEP, start=" from step {start} on")  # fmt: skip
_FAILURES_REWARDED = data_fault("failures_rewarded", "failed rollouts are trained on as if they were wrong answers", "{num:,} rows with finish reason {reasons} all have the reward {value:g}, an advantage, and tokens in the loss, so the policy learns from failures of the environment or the verifier", words=lambda n: {"reasons": " or ".join(n["reasons"])})  # fmt: skip
_REWARDS_OF_GROUPS = data_fault("rewards_of_groups", "some groups all get the same reward", "all rows in {num_groups:,} groups have the reward {value:g}, which hardly occurs in other groups, so the reward function may fail for these prompts", BY_GROUP)  # fmt: skip
_REWARDS_BY_PROMPT = data_fault("rewards_by_prompt", "rewards do not depend on the response", "in all {num:,} groups whose responses differ, every response has the same reward, although rewards differ between prompts, so there is nothing to learn within a group; rewards may be cached by prompt", BY_GROUP, hidden_by=("rewards_constant",))  # fmt: skip


def _rewards(run: DataRows) -> Iterator[DataFinding]:
    """Find rewards that are constant, overall or within groups, from some step on, and failed rollouts in the loss."""
    rewards, at = run.rows["reward"], run.at
    known = np.isfinite(rewards)
    if not known.any():
        return
    response = run.rows["response"]
    if stuck := _stuck(run, rewards):
        later, is_always = stuck
        start = None if is_always else int(run.steps[at[later].min()])
        yield from run.find(_REWARDS_CONSTANT, later, value=float(rewards[later][0]), start=start, notice=is_always)
    ended, which = np.unique(run.ended, return_inverse=True)
    has_failed = np.array([bool(_FAILED.search(name)) for name in ended])[which]
    trains = has_failed & known & (run.rows["loss_length"] > 0) & (np.nan_to_num(run.rows["advantage"]) != 0)
    if trains.any() and np.ptp(rewards[trains]) == 0 and np.ptp(rewards[known & ~has_failed]):
        numbers: dict[str, Any] = {"reasons": np.unique(run.ended[trains]).tolist(), "value": float(rewards[trains][0])}
        yield from run.find(_FAILURES_REWARDED, trains, least=8, notice=True, **numbers)
    asked = np.flatnonzero(known & (response > 0) & (run.labels > 0))
    cell, reward = numbered(run.labels[asked], at[asked]), rewards[asked]
    least = 1e-9 * np.abs(reward).max(initial=0.0)
    differs = np.abs(reward - mean_of(cell, reward)) > least
    varies = mean_of(cell, 1.0 * differs) > 0
    equal = ~varies & (count_of(cell) > 1) & (reward < reward.max(initial=-np.inf))  # solved prompts have the maximum
    values, counts = np.unique(reward[equal], return_counts=True)
    if len(values):
        value = float(values[counts.argmax()])
        alike = ~varies & (reward == value)
        num, elsewhere = len(np.unique(cell[alike])), (reward[~alike] == value).mean() if varies.any() else 1.0
        if min(num, len(np.unique(cell[varies]))) >= 8 and elsewhere < 0.01:
            affected = np.isin(np.arange(len(at)), asked[alike])
            yield from run.find(_REWARDS_OF_GROUPS, affected, num_groups=num, value=value, notice=True)
    within = at[asked] > at[asked][differs].max(initial=-1)
    if not within.any():
        return
    kind = np.unique(response[asked], return_inverse=True)[1]
    # Number of distinct responses per group, minus one.
    more = np.bincount(np.unique(np.stack([cell, kind])[:, within], axis=1)[0]) - 1
    share = np.unique(reward[within], return_counts=True)[1].max() / within.sum()
    if (num := int((more > 0).sum())) >= 8 and np.maximum(more, 0).sum() * np.log(share) < CHANCE:
        affected = np.isin(np.arange(len(at)), asked[within])
        yield from run.find(_REWARDS_BY_PROMPT, affected, num=num, notice_if_whole=True)


_UNRELATED = """
SELECT coalesce(avg((2 * least(num_halves, num_ends) > num)::INTEGER), 0) > 0.95
FROM (
    SELECT count(*) AS num, count(DISTINCT prompt_ids[:len(prompt_ids) // 2]) AS num_halves, count(DISTINCT prompt_ids[-(len(prompt_ids) // 4 + 1):]) AS num_ends
    FROM sequences WHERE group_id IS NOT NULL GROUP BY step, group_id
)
"""
"""Whether most prompts in nearly all groups differ in their first half and their last quarter. Turns of a trajectory begin
with the same task, and prompts with different examples end with it."""


_ONE_ROW_GROUPS = data_fault("one_row_groups", "group ids are unique per row", "each prompt has {rows_per_prompt:.3g} rows on average, but every row has its own group", BY_GROUP)  # fmt: skip
_MIX_PROMPTS = data_fault("groups_mix_prompts", "groups mix prompts", "{num_groups:,} groups contain rows from several prompts, up to {most} prompts in one group", BY_GROUP)  # fmt: skip
_ROWS_ALONE = data_fault("rows_alone", "some groups contain a single row", "{num:,} rows are alone in their group although other rows in the step have the same prompt, so their baseline is their own reward", BY_GROUP)  # fmt: skip
_PROMPTS_SPLIT = data_fault("prompts_split", "prompts are split over groups", "each prompt's rows are split over {num_groups} groups per step, each with its own baseline, or the prompt was drawn {num_groups} times", BY_GROUP)  # fmt: skip


def _groups(run: DataRows) -> Iterator[DataFinding]:
    known = (run.rows["group"] > 0) & (run.rows["prompt"] > 0)
    known[run.continued[1]] = False  # a later turn has a longer prompt
    at, find = run.at[known], partial(run.find, rows=known)
    if not len(at):
        return
    group, prompt = (numbered(run.rows[name][known], at) for name in ("group", "prompt"))
    cell = numbered(group, prompt)
    firsts = np.unique(cell, return_index=True)[1]
    prompts, groups = np.bincount(group[firsts])[group], np.bincount(prompt[firsts])[prompt]
    in_group, repeated, num_prompts = count_of(group), count_of(prompt) > 1, prompt.max() + 1
    # A group may contain several prompts (turns of a conversation). But if each of them is repeated within the group,
    # several groups share an id, and if each also occurs in another group, a group was split.
    all_repeat = mean_of(group, 1.0 * (count_of(cell) > 1)) == 1
    mixed = (prompts > 1) & (all_repeat | (mean_of(group, 1.0 * (groups > 1)) == 1))
    # A prompt's declared number of rows have different prompts.
    is_declared = np.isin(in_group, [*run.numbers(rf"{_NOT_TRAINING}.*(^|[./])({_DECLARED['rows']})$").values()])
    apart, alone = (2 * prompts > in_group) & (in_group > 2) & is_declared, (in_group == 1) & repeated
    if count_of(run.cell)[known].max() == 1 and repeated.mean() > 0.5:
        yield from find(_ONE_ROW_GROUPS, repeated, rows_per_prompt=len(at) / num_prompts)
    elif mixed.any():
        yield from find(_MIX_PROMPTS, mixed, num_groups=len(np.unique(group[mixed])), most=int(prompts.max()))
    elif apart.mean() > 0.95 and run.database.connection.execute(_UNRELATED).fetchall() == [(True,)]:
        numbers: dict[str, Any] = {"num_groups": len(np.unique(group)), "most": int(prompts.max()), "notice": True}
        yield from find(_MIX_PROMPTS, apart, **numbers)
    elif alone.sum() >= 3 and in_group.max() > 1:
        yield from find(_ROWS_ALONE, alone)
    elif np.ptp(groups) == 0 and groups[0] > 1 and in_group.min() > 1 and num_prompts > 3 * len(np.unique(at)):
        yield from find(_PROMPTS_SPLIT, at >= 0, num_groups=int(groups[0]), notice=True)


_BATCH_REPEATS = data_fault("batch_repeats", "batches repeat", "at {num_steps:,} steps, at least 90% of the prompts and responses are the same as at the previous step")  # fmt: skip
_REWARDS_UNEQUAL = data_fault("rewards_unequal", "identical responses get different rewards", "{num:,} of {num_pairs:,} pairs of identical responses to the same prompt have different rewards; {case}", cases={
    "random": "no shift of the rewards explains this, so the reward is random or belongs to other rows",
    "reordered": "the rows of a group are not adjacent, so the batch was probably reordered after sampling, for example by length, and the rewards may have kept the old order",
    "moved": "with {rule}, only {num_left:,} do",
}, words=advantages.rule_words)  # fmt: skip


def _repeats(run: DataRows) -> Iterator[DataFinding]:
    """Find repeated batches, and identical responses with different rewards."""
    if not np.isfinite(run.rows["reward"]).any():
        return
    inspected = run.rows["response"] > 0
    response, step, reward = (run.rows[name][inspected] for name in ("response", "step", "reward"))
    at = run.at[inspected]
    steps = np.unique(step)
    rows = dict(zip(steps, split_steps(step, response), strict=True))
    shares = [np.isin(rows[each], rows.get(each - 1, [])).mean() for each in steps]
    again = (np.array(shares) >= 0.9) & (np.array([len(np.unique(rows[each])) for each in steps]) >= 8)
    yield from run.find(_BATCH_REPEATS, again, steps, least=2, notice=True, num_steps=int(again.sum()))
    order = np.lexsort((at, response))
    same = np.flatnonzero(response[order][1:] == response[order][:-1])
    one, two = order[same], order[same + 1]
    least = TINY * np.abs(reward[np.isfinite(reward)]).max(initial=0.0)
    within = at[one] == at[two]
    for asked in (within, np.ones(len(within), bool)):
        differs = asked & (np.abs(reward[one] - reward[two]) > least)
        numbers: dict[str, Any] = {"num_pairs": int(asked.sum())}
        if (num := int(differs.sum())) < 20:  # with few pairs, some shift fits by chance
            num_groups, num_blocks = len(np.unique(run.cell)), 1 + np.count_nonzero(np.diff(run.cell))
            if asked is within and (run.labels > 0).all() and num_blocks > 2 * num_groups:
                yield from run.find(_REWARDS_UNEQUAL, differs, step[one], signal="reordered", notice=True, **numbers)
            continue
        moves = {name: np.append(reward, np.nan)[rows] for name, rows in shifted(at).items()}
        left = {name: (asked & ~(np.abs(each[one] - each[two]) <= least)).sum() for name, each in moves.items()}
        move = min(left, key=left.__getitem__)
        is_moved = bool(10 * left[move] <= num)
        if is_moved or asked is within:
            numbers["signal"] = "random"
            if is_moved:
                numbers |= {"signal": "moved", "rule": move, "num_left": int(left[move])}
            yield from run.find(_REWARDS_UNEQUAL, differs, step[one], notice=not is_moved, **numbers)
            return


_IDS = """
SELECT step, row_number() OVER () AS place, response_ids
FROM sequences WHERE step IN ({steps}) AND hash(prompt_ids, response_ids) > 0
ORDER BY step, place
"""
"""In rows where every token id is 0, the hash is 0 as well, as if they had not been inspected (see _ROWS)."""
_TEXT_NATS = 30.0
"""Minimum log likelihood ratio between two orders of the rewards."""


_UNLIKE_RESPONSES = data_fault("rewards_unlike_responses", "rewards belong to other rows", "rewards depend on the responses of other rows ({case}): lengths, finish reasons and frequent tokens explain {best:.0%} of their variance, but {own:.0%} as recorded", cases={
    "moved": "{rule}", "sorted": "{name} and the response lengths, each sorted within its step",
}, words=lambda n: {"name": n.get("name") or "the reward", **advantages.rule_words(n)}, hidden_by=("rewards_differ", "rewards_unequal", "rewards_of_other_rows"))  # fmt: skip


def _texts(run: DataRows) -> Iterator[DataFinding]:
    """Find rewards that depend on other rows' responses (length, frequent tokens, finish reason) rather than on their own."""
    steps = run.steps if run.sample is None else np.unique(run.sample.steps)
    reward, asked = run.rows["reward"], (run.rows["response"] > 0) & np.isin(run.rows["step"], steps)
    num = int(np.isfinite(reward[asked]).sum())
    if num < 100 or not np.ptp(reward[asked & np.isfinite(reward)]):
        return
    # Leave out groups with several prompts: their rows are turns. If only last turns have a reward, the row after each
    # of them is the first turn of another trajectory, which looks different, and would seem to explain the reward.
    prompt = run.rows["prompt"]
    is_single = (prompt > 0) & (count_of(numbered(prompt, run.cell)) == count_of(run.cell))
    ids = run.database.connection.sql(_IDS.format(steps=run.inspected)).to_arrow_table()["response_ids"]
    tokens, size = array_of(flat(ids)[0]), run.rows["length"][asked].astype(int)
    row = np.repeat(np.arange(len(size)), size)
    kinds, frequency = np.unique(tokens, return_counts=True)
    usual = kinds[np.argsort(-frequency, kind="stable")][: min(num // 20, 16)]
    counts = [np.bincount(row[tokens == each], minlength=len(size)) for each in usual]
    x = np.log1p(np.stack([size, *counts], axis=1))
    x = np.c_[x, run.finish_reasons[asked] == "length"].astype(float)
    of_row = np.cumsum(asked) - 1

    def explained(place: np.ndarray, *, is_held_out: bool = False) -> tuple[float, int]:
        """Return the share of the rewards' variance that responses explain, and the number of rows. With `is_held_out`,
        the regression on the even steps predicts the odd ones and vice versa: one unusual response can explain a rare
        reward by chance, but does not predict others."""
        moved = np.append(reward, np.nan)[place]
        rows = np.flatnonzero(asked & is_single & np.isfinite(moved))
        if not len(rows):
            return 0.0, 0
        cell, is_odd = numbered(run.labels[rows], run.at[rows]), np.unique(run.at[rows], return_inverse=True)[1] % 2 > 0
        own, y = x[of_row[rows]], moved[rows] - mean_of(cell, moved[rows])
        own = own - np.stack([mean_of(cell, column) for column in own.T], axis=1)
        if y @ y <= TINY * (moved[rows] @ moved[rows]) or (is_held_out and not is_odd.any()):
            return 0.0, len(rows)
        left, every = y.copy(), np.ones(len(rows), bool)
        for part, other in ((is_odd, ~is_odd), (~is_odd, is_odd)) if is_held_out else ((every, every),):
            x_x, x_y = own[other].T @ own[other], own[other].T @ y[other]  # faster to solve than one equation per row
            left[part] -= own[part] @ np.linalg.lstsq(x_x, x_y, rcond=1e-10)[0]
        return 1 - float(left @ left / (y @ y)), len(rows)

    recorded, num = explained(np.arange(len(reward)))
    if num < 100 or recorded > 2 * x.shape[1] / num + 0.02:
        return
    moves = shifted(run.at, in_group=int(np.median(count_of(run.cell))))
    shares = {name: explained(place)[0] for name, place in moves.items() if (place >= 0).mean() > 0.5}
    best = max(shares, key=shares.__getitem__)
    share, _ = explained(moves[best], is_held_out=True)
    if num / 2 * np.log((1 - recorded) / max(1 - share, TINY)) > _TEXT_NATS:
        yield from run.find(_UNLIKE_RESPONSES, asked, signal="moved", rule=best, best=share, own=recorded)


def _unlike_lengths(run: DataRows) -> Iterator[DataFinding]:
    """Find rewards that are a function of the response length if each step's rows are sorted, but not as recorded."""
    names, parts, _ = run.parts
    for name, values in (*zip(names, parts.T, strict=True), (None, run.rows["reward"])):
        known = np.isfinite(values)
        at, value, length = run.at[known], values[known], run.rows["length"][known]
        size = np.unique(length, return_inverse=True)[1]
        if len(np.unique(value)) < 3 or len(size) - size.max() <= 20:
            continue
        value = value / np.abs(value).max()  # squares of large values would overflow
        if np.ptp(mean_of(at, value)) <= TINY:
            continue  # ranks, or other values that are the same at all steps
        own = 1 - float(np.var(value - mean_of(size, value)) / value.var())
        in_order = size[np.lexsort((size, at))]
        orders = (value[np.lexsort((sign * value, at))] for sign in (1, -1))
        if own < 0.5 and any(np.allclose(each, mean_of(in_order, each), rtol=TINY) for each in orders):
            yield from run.find(_UNLIKE_RESPONSES, known, signal="sorted", name=name, best=1.0, own=own)
            return


_SHUFFLE = r"^(?!.*(actor|critic|policy|batch|val|eval|test)).*shuffle"
"""Settings that shuffle the training data, not validation data or the mini-batches of an update."""


_PROMPTS_REPEAT = data_fault("prompts_repeat", "every step has the same prompts", "all {num:,} steps have the same {num_prompts:,} prompts, so the data loader may not advance", BY_GROUP, hidden_by=("batch_repeats",), is_often_intended=True)  # fmt: skip
_UNSHUFFLED = data_fault("prompts_unshuffled", "every epoch has the same order", "{setting} is recorded, but from step {start} on, each step has the prompts of {period} steps earlier, so the data are not reshuffled in each epoch", BY_GROUP, hidden_by=("prompts_restart",))  # fmt: skip
_PROMPTS_RESTART = data_fault("prompts_restart", "the resumed run starts with the first prompts again", "attempt {attempt} starts at step {start} with the prompts of step {first}, and repeats the prompts of {num_steps} steps in the same order, so the state of the data loader was not restored, unless an epoch ended there", BY_GROUP)  # fmt: skip


def _restarts(run: DataRows) -> Iterator[DataFinding]:
    """Find steps that all have the same prompts, epochs that are not shuffled, and resumed attempts that start over."""
    prompt = run.rows["prompt"]
    if not prompt.all():
        return
    drawn = dict(zip(run.steps.tolist(), map(frozenset, split_steps(run.at, prompt)), strict=True))
    first, *others = {*drawn.values()}
    if len(drawn) > 2 and len(first) > 1 and not others:
        yield from run.find(_PROMPTS_REPEAT, run.steps > -1, run.steps, num_prompts=len(first), notice=True)
    sets = [*drawn.values()]
    shuffled = "" if run.setting(_SHUFFLE, r"^(false|0(\.0)?)$") else run.switched_on(_SHUFFLE)
    period = len({*sets})
    is_epoch = 2 <= period <= len(sets) // 2 and sets[period:] == sets[:-period]
    # Log of the number of ways to divide an epoch's prompts into such batches: a shuffle seldom repeats one.
    num_prompts = len(frozenset().union(*sets[:period]))
    orders = math.lgamma(num_prompts + 1) - sum(math.lgamma(len(batch) + 1) for batch in sets[:period])
    if shuffled and is_epoch and -orders * (len(sets) // period - 1) < CHANCE:
        numbers: dict[str, Any] = {"setting": shuffled, "period": period, "start": int(run.steps[period])}
        yield from run.find(_UNSHUFFLED, np.arange(len(sets)) >= period, run.steps, **numbers)
    known = attempts(run.database)
    for attempt in known[1:]:
        by = attempt.first_step - known[0].first_step
        there = [step for step in drawn if step >= attempt.first_step and step - by in drawn]
        again = np.array([drawn[step] == drawn[step - by] for step in there], bool)
        num = int(np.argmin(np.r_[again, False]))
        before = [each for step, each in drawn.items() if step < attempt.first_step]
        # Up to the steps that the earlier attempt reached, all prompts must repeat, but not within this attempt.
        if num >= 2 and num >= min(len(again), by) and len({*before}) == len(before):
            numbers = {"attempt": attempt.attempt, "start": attempt.first_step, "num_steps": num}
            affected = np.arange(len(again)) < num
            yield from run.find(_PROMPTS_RESTART, affected, np.array(there), first=known[0].first_step, **numbers)


_LIMIT = "max_(new_)?tokens|max_(completion|response)_length|(rollout_|generate_)max_(response_)?len|max_gen(eration)?_len(gth)?"
_DECLARED = {
    **dict(zip(SAMPLING, SAMPLING, strict=True)), "max_tokens": _LIMIT,
    "prompts": r"max_prompt_(length|len|tokens)", "responses": _LIMIT,
    "rows": r"num_generations(_per_prompt)?|(num_|n_)?samples_per_prompt|n_samples|group_size|rollouts_per_(example|prompt)|rollout[./]n",
}  # fmt: skip
"""Quantity in the rows -> pattern for the last part of its name in frameworks' settings."""
_NOT_TRAINING = r"^(?!.*(^|[./_])(val|eval|test|valid|teacher|distil\w*|draft|reward|rm[./_]|judge|grader|verifier|critic|simulat|quant|awq|gptq|generation_config))"
_MASKS_CUT = r"(^|[./])(mask_truncated\w*|(apply_)?overlong_filter(ing)?|(filter|exclude)_truncated(?!\w*prompt)\w*)$"
_SEVERAL = 3
"""Minimum number of rows or groups that contradict a setting."""
_Contradiction = tuple[np.ndarray, dict[str, Any]]
"""The rows that contradict a setting ([N] bool), and the setting, what the rows show instead (a key of _SHOWN), and numbers."""
_SHOWN = {
    "lengths": "{name} have up to {length:,.0f} tokens", "sampling": "the rows' {name} is {value:g}",
    "some_sampling": "the rows' {name} is {value:g} in {num:,} of {of:,} rows", "group_size": "each group has {value:g} rows",
    "group_sizes": "{num:,} groups have only {least:g} to {most:g} rows, as if rows had been dropped before advantages were computed",
    "truncated": "{num:,} truncated rows have tokens in the loss and an advantage", "equal": "{num:,} groups with equal rewards are in the loss",
}  # fmt: skip


def _contradictions(numbers: Mapping[str, Any]) -> dict[str, str]:
    shown = numbers["settings"]
    texts = (f"{each['setting']} is recorded, but {_SHOWN[each['shown']].format_map(each)}" for each in shown)
    return {"settings": "; ".join(texts), "plural": "s" * (len(shown) > 1)}


_SETTING_CONTRADICTS = data_fault("setting_contradicts", "the rows contradict a recorded setting", "{settings}, so the setting{plural} may be ignored", "SELECT step, group_id, seq_id, temperature, top_p, top_k, max_tokens, finish_reason, reward, advantage FROM {rows} ORDER BY step", words=_contradictions)  # fmt: skip
_PROMPTS_CUT = data_fault("prompts_cut", "prompts are cut off", "{num:,} rows have a prompt of exactly {limit:,.0f} tokens, the recorded {setting}, and few have nearly as many, so longer prompts were truncated, and may lack their question or their end", "SELECT step, seq_id, len(prompt_ids) AS num_prompt_tokens FROM {rows} ORDER BY num_prompt_tokens DESC, step", is_often_intended=True)  # fmt: skip


def _settings(run: DataRows) -> Iterator[DataFinding]:
    """Find settings that the rows contradict, as if the framework ignored them."""
    found = [*_sampled_otherwise(run), *_kept_otherwise(run)]
    if found:
        affected, settings = np.any([rows for rows, _ in found], axis=0), [shown for _, shown in found]
        yield from run.find(_SETTING_CONTRADICTS, affected, settings=settings, notice=True)


def _cut_prompts(run: DataRows) -> Iterator[DataFinding]:
    """Find prompts that were truncated to the limit that a setting declares."""
    length = run.rows["prompt_length"]
    of_prompts = length[np.unique(run.rows["prompt"], return_index=True)[1]]
    for setting, limit in run.numbers(rf"{_NOT_TRAINING}.*(^|[./])({_DECLARED['prompts']})$").items():
        at_limit = of_prompts == limit
        # Without truncation, the limit is about as frequent as the lengths just below it.
        near = (of_prompts >= 0.9 * limit) & ~at_limit
        if at_limit.sum() >= 8 and at_limit.mean() >= 0.1 and near.sum() < at_limit.sum() and not at_limit.all():
            numbers: dict[str, Any] = {"setting": setting, "limit": limit, "notice": True}
            yield from run.find(_PROMPTS_CUT, length == limit, **numbers)
            return


def _sampled_otherwise(run: DataRows) -> Iterator[_Contradiction]:
    """Compare settings with sampling columns and group sizes, if both are constant throughout the run."""
    given = {name: run.numbers(rf"{_NOT_TRAINING}.*(^|[./])({pattern})$") for name, pattern in _DECLARED.items()}
    given = {name: each for name, each in given.items() if len({*each.values()}) == 1}
    if not given:
        return
    query = f"SELECT {', '.join(SAMPLING)} FROM (SELECT *, row_number() OVER () AS place FROM sequences) ORDER BY step, place"
    columns = run.database.connection.sql(query).to_arrow_table()
    shown = {name: array_of(columns[name].cast(pa.float64())) for name in SAMPLING}
    has_turns = _has_turns(run)
    shown["rows"] = np.where((run.rows["group"] > 0) & (not has_turns), count_of(run.cell), np.nan)
    if has_turns:  # one of them may limit a turn, the other all turns
        shown["max_tokens"] = np.full(len(run.at), np.nan)
    lengths = {"responses": run.rows["length"], "prompts": run.rows["prompt_length"]}
    if np.isfinite(shown["max_tokens"]).any():  # `limit_exceeded` then compares it with the lengths
        given.pop("responses", None)
    for name, settings in given.items():
        (key, declared), *_ = settings.items()
        setting = f"{key} = {declared:g}"
        if name in lengths:
            beyond = lengths[name] > declared
            if declared > 0 and beyond.sum() >= _SEVERAL and not has_turns:
                length = float(lengths[name].max())
                yield beyond, {"setting": setting, "shown": "lengths", "name": name, "length": length}
            continue
        there = np.isfinite(shown[name]) & ~(np.abs(shown[name] - declared) <= 1e-6 * declared)
        values = shown[name][there]
        num = len(np.unique(run.cell[there])) if name == "rows" else len(values)
        is_part = name == "rows" and num >= _SEVERAL and np.ptp(values) > 0 and values.max() < declared
        if is_part and there.mean() > 0.5 and _are_centred(run):  # the groups were incomplete when they were normalised
            sizes = {"num": num, "least": float(values.min()), "most": float(values.max())}
            yield there, {"setting": setting, "shown": "group_sizes", **sizes}
            continue
        # A row can be greedy by mistake, but for other settings, 0 or less means that they are off.
        if num < _SEVERAL or np.ptp(values) > 0 or declared <= 0 or (values[0] <= 0 and name != "temperature"):
            continue
        if not there.all() and name != "temperature":
            continue
        shown_as = "sampling" if there.all() else "some_sampling"
        if name == "rows":
            # 1 is a default, and other options may multiply the rows.
            if declared == 1 or (values[0] < declared and not _are_centred(run)):
                continue
            shown_as = "group_size"
        numbers = {"name": name, "value": float(values[0]), "num": num, "of": int(np.isfinite(shown[name]).sum())}
        yield there, {"setting": setting, "shown": shown_as, **numbers}


def _has_turns(run: DataRows) -> bool:
    """Return True if trajectories have several turns, in one row or in several rows of their group."""
    rows, prompt = run.rows, np.unique(run.rows["prompt"], return_inverse=True)[1]
    has_gaps = (rows["loss_length"] > 0) & (rows["loss_length"] < rows["length"])
    are_mixed = (rows["group"] > 0) & (mean_of(run.cell, prompt) != prompt)
    return bool(has_gaps.any() or are_mixed.any() or len(run.continued[0]))


def _are_centred(run: DataRows) -> bool:
    """Return True if the advantages of nearly all groups have mean 0, as in complete groups."""
    advantage, size = run.rows["advantage"], rms_of(run.cell, run.rows["advantage"])
    known = np.isfinite(size) & (size > 0)
    return bool(known.any() and (np.abs(mean_of(run.cell, advantage)) < CLOSE * size)[known].mean() > 0.95)


def _kept_otherwise(run: DataRows) -> Iterator[_Contradiction]:
    """Compare settings that leave out truncated rows or groups with equal rewards with the rows in the loss."""
    rows, advantage = run.rows, run.rows["advantage"]
    # If other rows have an advantage, rows without one are not in the loss.
    in_loss = (rows["loss_length"] > 0) & (np.isfinite(advantage) | ~np.isfinite(advantage).any())
    cut = in_loss & (advantage != 0) & (run.ended == "length")
    if (setting := run.switched_on(_MASKS_CUT)) and cut.sum() >= _SEVERAL:
        yield cut, {"setting": setting, "shown": "truncated", "num": int(cut.sum())}
    setting = run.switched_on(_FILTER)
    if not setting or run.setting(r"filter_groups[./]metric$", r"^(?!.*(reward|score|acc))"):
        return
    # If rewards are equal but advantages are not 0, only a part of the group was recorded, or the reward was adjusted.
    cell, reward = run.cell, run.reward
    size = np.abs(np.where(np.isfinite(advantage), advantage, 0.0))
    differs = ~(np.abs(reward - mean_of(cell, reward)) <= TINY) | (size > CLOSE * rms_of(run.at, size))
    varies = mean_of(cell, 1.0 * differs) > 0
    equal = (rows["group"] > 0) & ~varies & (count_of(cell) > 1) & in_loss
    if equal.sum() >= max(_SEVERAL, 0.02 * in_loss.sum()):
        yield equal, {"setting": setting, "shown": "equal", "num": len(np.unique(cell[equal]))}


_LONGEST = r"(soft_max_length|max_resp_len|max_response_length|max_generate_length)$"
_PENALISES_CUT = r"(^|[./])((missing|non|no)_?eos_?penalty|mask_no_eos_with_zero|stop_properly_penalty\w*)$"


_PENALTY_MISSING = data_fault("penalty_missing", "a penalty is not applied", {
    "long": "{setting} is recorded, but the rewards of {num:,} responses with clearly more than {limit:,.0f} tokens equal those of others",
    "truncated": "{setting} is recorded, but the rewards of {num:,} truncated responses equal those of others",
}, hidden_by=("rewards_unlike_responses",))  # fmt: skip
_PENALTY_WRONG = data_fault("penalty_wrong", "a penalty is not the declared one", "{setting} is recorded, but rewards of {num:,} responses with more than {limit:,.0f} tokens are not those of shorter ones minus the penalty: it should be {expected:.3g} (median), but is {given:.3g}, so it may be computed from another length")  # fmt: skip


def _penalties(run: DataRows) -> Iterator[DataFinding]:
    """Find rewards without the penalty on long or truncated responses that a setting declares."""
    rows, reward = run.rows, run.rows["reward"]
    known, asked = np.isfinite(reward), []
    name = r"overlong_buffer(_cfg)?[./_]"
    size = rf"({name}len|soft_cache_length)$"
    buffer, longest = run.number(size), run.number(_LONGEST)
    factor = run.number(r"overlong_(buffer(_cfg)?[./_])?penalty_factor$")
    has_switch = run.setting(name + "enable$", "")
    setting = run.switched_on(name + "enable$") if has_switch else run.setting(size, "")
    if buffer and longest and factor != 0 and setting:
        limit = longest - buffer
        over = rows["length"] - limit > 0.05 * buffer
        numbers: dict[str, Any] = {"signal": "long", "setting": setting, "limit": limit}
        asked.append((numbers, over, rows["length"] <= limit, False))
        yield from _wrong_penalty(run, setting, limit, (factor or 1.0) / buffer)
    if setting := run.setting(_PENALISES_CUT, r"^(true|[1-9].*|0?\.0*[1-9].*)$"):
        cut = (run.ended == "length") & (reward != 0)
        asked.append(({"signal": "truncated", "setting": setting}, cut, run.ended == "stop", True))
    for numbers, penalised, others, is_notice in asked:
        usual = np.unique(reward[known & others])
        over = known & penalised & (len(usual) <= 20)  # many values could equal others by chance
        # The reward may be recorded without its penalty. Then, equal rewards in a group have different advantages.
        cell = np.unique(np.stack([run.cell, np.nan_to_num(reward)]), axis=1, return_inverse=True)[1]
        apart = np.abs(rows["advantage"] - mean_of(cell, rows["advantage"])) > CLOSE * rms_of(run.at, rows["advantage"])
        if np.isin(reward[over], usual).sum() > 0.95 * over.sum() and (run.is_per_token or not (apart & over).any()):
            shows = over & np.isfinite(rows["advantage"]) & (mean_of(cell, 1.0 * others) > 0)
            is_notice |= run.is_per_token or not shows.any()
            yield from run.find(_PENALTY_MISSING, over, least=8, notice=is_notice, **numbers)


def _wrong_penalty(run: DataRows, setting: str, limit: float, slope: float) -> Iterator[DataFinding]:
    """Find rewards of responses of more than `limit` tokens that are lower than others', but not by the declared penalty,
    `slope` times the number of further tokens (DAPO, arXiv 2503.14476, equation 13)."""
    reward, more = run.rows["reward"], run.rows["length"] - limit
    short, over = (np.isfinite(reward) & part for part in (more <= 0, more > 1))
    usual, num = np.unique(reward[short], return_counts=True)
    # Further components of the reward would have many values.
    if not 0 < len(usual) <= 20 or num.min() < 5:
        return
    penalty = usual - reward[:, None]  # [N, levels]
    slack = max(1.01 * slope, 0.05 * slope * float(more.max()), 2.0**-7 * float(np.abs(reward[over]).max(initial=0.0)))
    lengths = (more, run.rows["loss_length"] - limit)
    is_right = np.any(
        [(np.abs(penalty - slope * np.maximum(each, 0)[:, None]) < slack).any(axis=1) for each in lengths], axis=0
    )
    is_usual, is_wrong = (np.abs(penalty) < TINY).any(axis=1), over & ~is_right
    if is_wrong.sum() > 0.5 * over.sum() and (is_wrong & is_usual).sum() < 0.95 * is_wrong.sum():
        given = np.where(penalty > -TINY, penalty, np.inf).min(axis=1)
        numbers = {"limit": limit, "expected": slope * more, "given": given, "setting": setting}
        yield from run.find(_PENALTY_WRONG, is_wrong, least=8, notice=True, **numbers)


_KL_MISSING = data_fault("kl_penalty_missing", "the KL penalty is not applied", "{setting} is recorded with a coefficient of {coefficient:g}, but in {num:,} rows, advantages equal those of rows with the same reward and a different KL to the reference (|KL| {kl:.3g} nats, median)", BY_GROUP)  # fmt: skip


def _kl_penalty(run: DataRows) -> Iterator[DataFinding]:
    """Find advantages of whole responses without the KL penalty that verl's settings declare for rewards."""
    setting = run.switched_on(KL_IN_REWARD)
    coefficient = run.number(r"(kl_coef|(^|[./])beta)$") or 0.0
    if not setting or not coefficient or run.is_per_token or not run.kl:
        return
    kl = coefficient * next(iter(run.kl.values()))
    reward, advantage = run.rows["reward"], run.rows["advantage"]
    known = np.isfinite(reward) & np.isfinite(advantage) & np.isfinite(kl) & (run.labels > 0)
    cell = np.unique(np.stack([run.cell, reward]), axis=1, return_inverse=True)[1]
    cell = np.where(known, cell + 1, 0)
    # Relative to the rewards' standard deviation, rows with equal rewards differ by their penalties.
    spread = rms_of(run.at, np.where(known, reward - mean_of(run.cell, np.nan_to_num(reward)), 0.0))
    size = rms_of(run.at, np.where(known, advantage, 0.0))
    asked = known & (np.abs(kl - mean_of(cell, np.where(known, kl, 0.0))) > 0.01 * spread)
    equal = np.abs(advantage - mean_of(cell, np.where(known, advantage, 0.0))) < 1e-4 * size
    if (asked & equal).sum() > 0.95 * asked.sum():
        numbers: dict[str, Any] = {"setting": setting, "coefficient": coefficient, "kl": np.abs(kl) / coefficient}
        yield from run.find(_KL_MISSING, asked & equal, least=20, **numbers)


_USE_KL = r"(^|[./_])use_kl(_loss|_in_reward|_penalty)?$"
_KL_METRIC = re.compile(r"(^|/)(ref_?kl|kl(_(loss|rewards?|penalty|div|ref))?)(/(mean|avg))?$")


_KL_IS_ZERO = data_fault("kl_is_zero", "the KL to the reference is always 0", "{name} is logged as 0 at all {num:,} steps, although {setting} is recorded, so the KL term has no effect: the reference was not computed, or it is the policy itself", metrics.OF_METRIC, hidden_by=("weights_unchanged",))  # fmt: skip


def _kl_of_nothing(run: DataRows) -> Iterator[DataFinding]:
    """Find a logged KL to the reference that is always 0, although a setting gives it a weight."""
    query = "SELECT name, count(DISTINCT step) > 3 AND bool_and(value = 0) FROM metrics WHERE NOT starts_with(name, 'hyperparameter/') GROUP BY name"
    logged = run.database.connection.execute(query).fetchall()
    names = {name: is_zero for name, is_zero in logged if _KL_METRIC.search(name)}
    # Of several KL terms, only one may have a weight: slime logs `rollout/kl` as 0 if the KL is part of the loss.
    is_used = run.switched_on(_USE_KL) or not run.setting(_USE_KL, "")
    if names and all(names.values()) and is_used and run.number(metrics.KL_COEFFICIENT):
        numbers: dict[str, Any] = {"name": min(names), "setting": run.setting(metrics.KL_COEFFICIENT, r"[1-9]")}
        yield from run.find(_KL_IS_ZERO, run.steps > -1, run.steps, **numbers)


_OF_REFERENCE = "SELECT step, seq_id, position, token_id, logprob_a, logprob_b, d FROM pair('train', '{name}') ORDER BY step, seq_id, position LIMIT 40"
_KL_GROWS = data_fault("kl_grows", "the KL to the reference grows in spite of its penalty", "{setting} is recorded, but the mean KL to the reference grows to {kl:.3g} nats per token, which costs {penalty:.2g} per token, more than rewards can usually gain, so the KL term may have the wrong sign or be missing from the loss", _OF_REFERENCE)  # fmt: skip
_MAX_PENALTY = 0.2
"""Mean KL penalty per token above which a growing KL is reported. It was set on public reports (sets 22 to 37, not blind):
three faulty runs reach 0.29 or more, and 47 healthy ones at most 0.11."""


def _kl_that_grows(run: DataRows) -> Iterator[DataFinding]:
    """Find a KL to the reference that grows further than an objective with a recorded KL penalty lets it."""
    coefficient = run.number(metrics.KL_COEFFICIENT)
    if not coefficient or not run.kl:
        return
    kl, known = run.kl["k3"], np.isfinite(run.kl["k3"])
    num = np.bincount(run.at, known * run.rows["loss_length"], len(run.steps))
    mean = np.divide(np.bincount(run.at, np.where(known, kl, 0.0), len(run.steps)), num, out=0.0 * num, where=num > 0)
    penalty, grows = coefficient * mean, np.diff(mean[num > 0]) > 0
    if len(grows) >= 4 and grows.mean() >= 0.8:
        numbers: dict[str, Any] = {"name": REFERENCE, "setting": run.setting(metrics.KL_COEFFICIENT, r"[1-9]")}
        numbers |= {"kl": float(mean[num > 0][-1]), "penalty": float(penalty[num > 0][-1])}
        yield from run.find(_KL_GROWS, penalty > _MAX_PENALTY, run.steps, notice=True, **numbers)


# A token with probability 1 has logprob 0 in both passes, so a step counts only if it has a less likely token.
_EQUAL = """
SELECT a.step, bool_and(a.logprobs = b.logprobs) AND min(list_min(a.logprobs)) < -1e-3 AS equal, sum(len(a.logprobs)) AS num, a.iteration > 0 AS is_reused,
       coalesce(max(a.policy_version - coalesce(b.policy_version, s.policy_version)), 0) AS lag, any_value(a.contract), any_value(b.contract)
FROM scores AS a JOIN scores AS b USING (run, step, seq_id) JOIN sequences AS s USING (run, step, seq_id)
WHERE a."pass" = $a AND b."pass" = $b AND b.iteration = 0 AND a.step IN ({steps})
GROUP BY ALL ORDER BY a.step
"""
_AT_START = """
SELECT step, mean_abs_d FROM pair_steps('train', 'reference')
WHERE step = (SELECT min(step) FROM scores WHERE "pass" = 'train' AND iteration = 0 AND policy_version = 0)
"""
_OTHER_WEIGHTS = 0.2
"""Minimum mean |d| between two passes (nats) that 16-bit rounding cannot explain."""


_APART = "the logprobs of train and {name} differ by {size:.2g} nats on average, more than rounding explains, "
_AT_START_APART = "before the first update, " + _APART


def _apart_words(numbers: Mapping[str, Any]) -> dict[str, str]:
    finding, num = numbers["finding"], abs(numbers.get("lag", 0))
    known = {} if finding is None else {"evidence": evidence_text(finding), "cause": finding.title}
    place = {"place": where_text(numbers)} if "feature" in numbers else {}
    return {**known, **place, "tokens": f"{num} token{'s' * (num > 1)}"}


_REFERENCE_APART = data_fault("reference_apart", "the {name} pass does not match train: {signal}", {
    "constant": _APART + "because every {name} logprob is {value:g}, so it was not computed",
    "weights": _AT_START_APART + "so the reference's weights are not the initial policy's, for example because an adapter is missing, or it reads other inputs, such as prompts without their images{feature}",
    "temperature": _AT_START_APART + "because {evidence}", "other_tokens": _APART + "because {evidence}",
    "computation": _APART + "because {evidence}",
    "noise": _APART + "because its logprobs of the same token with the same prefix differ within a step by {own:.2g} nats (rms, in the logit), and train's by {of_train:.2g}, so a random operation, such as dropout, is active in the loss's forward pass",
    "shifted": _APART + "because each value is recorded {tokens} too {direction} (correlation with train: {moved:.2f} after shifting, {own:.2f} as recorded)",
}, _OF_REFERENCE, words=_apart_words, signal={
    "constant": "placeholders", "weights": "different weights or inputs", "temperature": "a different temperature",
    "computation": "{cause}", "noise": "random noise", "shifted": "shifted by {tokens}", "other_tokens": "values of other tokens",
}, feature="; the tokens that differ most ({inside:.2g} nats on average, {outside:.2g} elsewhere) are {place} ({covered:.0%} of the tokens)",
)  # fmt: skip


def _reference(run: DataRows) -> Iterator[DataFinding]:
    """Find passes, except train and rollout, with values of other tokens, other settings or changing weights."""
    passes = scored_passes(run.database)
    for name in passes if TRAIN in passes else ():
        if name in (TRAIN, ROLLOUT) or name.startswith(REPLAY_PREFIX):
            continue
        data = _other_pass(run.database, name, run.database.steps)
        if not data.num_kept:
            continue
        if data.num_kept >= FEW and np.ptp(data.b) == 0 and np.abs(data.d).mean() > _OTHER_WEIGHTS:
            numbers: dict[str, Any] = {"name": name, "size": float(np.abs(data.d).mean()), "value": float(data.b[0])}
            yield from run.find(_REFERENCE_APART, run.at >= 0, signal="constant", **numbers)
            continue
        moved = [*_moved(run, name, data)]
        yield from moved
        if name == CURRENT:
            yield from () if moved else _other_computation(run, data)
            continue
        yield from _changing_weights(run, name, data)
        for step, size in run.database.connection.execute(_AT_START).fetchall() if name == REFERENCE else ():
            if (size or 0.0) > _OTHER_WEIGHTS and not moved:
                data = _other_pass(run.database, name, f"{step}:{step}")
                find = partial(run.find, _REFERENCE_APART, run.at >= 0, notice=True, name=name, size=size)
                if by_temperature := find_temperature(data):
                    yield from find(signal="temperature", finding=by_temperature[-1].finding)
                else:
                    yield from find(signal="weights", **_place_numbers(run, data))


def _other_computation(run: DataRows, data: PairData) -> Iterator[DataFinding]:
    """Find a pass of the loss (`current`) that differs from train in every row, although no update precedes a step's
    first batch: a temperature or filter that only one of them applies, or random operations."""
    data = data.within(data.updates_behind[data.seq] == 0)
    if data.num_kept < FEW or level(data) <= allowed_noise(data):
        return
    exact = (each for each in (*find_temperature(data), *find_one_sided(data)) if (each.left or 0.0) < MAX_LEFT)
    best = max(exact, key=lambda each: each.gain, default=None)
    off = means(logit_error(data), data.seq, data.sample.num_sequences)
    is_whole = np.isin(run.rows["step"], data.sample.steps).sum() == len(off)  # a step's first batch is inspected
    if best is not None and best.gain > PLACE_NATS:
        numbers: dict[str, Any] = {"signal": "computation", "finding": best.finding}
    elif np.nanmin(off) > allowed_noise(data) and is_whole and not_repeatable(data) == "b":
        numbers = {"signal": "noise", "own": repeats(data).b, "of_train": repeats(data).a}
    else:
        return
    is_certain = best is not None and not (data.sample.a.versions - data.sample.b.versions).filled(1).any()
    numbers |= {"name": CURRENT, "size": float(np.abs(data.d).mean()), "notice": not is_certain}
    yield from run.find(_REFERENCE_APART, run.at >= 0, **numbers)


# TRL records `ref_model_sync_steps` even if it does not replace the reference.
_SYNCED = r"(sync|update|reset|refresh|replace|ema|moving)_?(ref|teacher)|ref\w*[_./](\w*_)?(update|reset|ema|refresh)|ref(?!_model)\w*_sync|tr_?dpo|teacher\w*(update|sync|ema|regulari[sz]ation)"


_REFERENCE_CHANGES = data_fault("reference_changes", "the {name} pass's weights change during the run", "for the same tokens with the same prefix, {name}'s logprobs differ by {size:.2g} nats from those at earlier steps (median, in the logit, over {num_tokens:,} repeated tokens), {cause}", _OF_REFERENCE, cause={
    "updated": "so it is updated or reloaded during the run",
    "updated_or_context": "so it is updated or reloaded during the run, or reads a context that is not recorded",
    "policy": "and then equal train's up to rounding, so it is the policy itself, and the KL to it is about 0",
})  # fmt: skip
_REFERENCE_REPLACED = data_fault("reference_replaced", "the {name} pass becomes the policy", "{name} and train differ by up to {size:.2g} nats (rms) before step {start}, but are equal there up to rounding, so {name} was loaded from the policy of that step, for example after a resumption", _OF_REFERENCE)  # fmt: skip


def _changing_weights(run: DataRows, name: str, data: PairData) -> Iterator[DataFinding]:
    """Find a reference or teacher whose weights change although no setting says so."""
    found = movement(data.sample, np.flatnonzero(data.keep), data.b, allowed_noise(data))
    if run.setting(_SYNCED, r"^(?!(false|none|null|no|off|0(\.0)?|-1)?$)"):
        return
    if found is None:
        yield from _replaced_reference(run, name, data)
        return
    pair = _compared(run)
    if pair is not None and pair.num_kept and np.median(logit_error(pair)) > allowed_noise(pair):
        return  # the trainer's values may depend on the other rows in the batch
    steps, known = data.sample.steps[data.seq], np.unique(data.sample.steps)
    # A teacher's prompt may contain a hint, such as a solution.
    cause = "updated" if name == REFERENCE else "updated_or_context"
    if np.median(logit_error(data)[steps >= found.since]) < found.size / 10:
        cause = "policy"
    numbers: dict[str, Any] = {"num_tokens": found.tokens, "size": found.size, "cause": cause}
    yield from run.find(_REFERENCE_CHANGES, known >= found.since, known, name=name, notice=True, **numbers)


_FAR = 5.0
"""Minimum factor by which an earlier distance to the reference exceeds rounding."""


def _replaced_reference(run: DataRows, name: str, data: PairData) -> Iterator[DataFinding]:
    """Find a step at which a reference equals the policy again up to rounding, after being far from it."""
    step, at = np.unique(data.sample.steps[data.seq], return_inverse=True)
    size, rounding = np.sqrt(np.bincount(at, data.d**2) / np.bincount(at)), allowed_noise(data)
    before = np.maximum.accumulate(np.r_[0.0, size])[:-1]
    again = (size <= rounding / _FAR) & (before > _FAR * rounding)
    if again.any() and not again[np.argmax(again) :].all():  # a policy may return to its reference and stay there
        numbers: dict[str, Any] = {"start": int(step[again][0]), "size": float(before[again][0])}
        yield from run.find(_REFERENCE_REPLACED, step >= step[again][0], step, name=name, notice=True, **numbers)


_SAMPLING_CONTRADICTS = data_fault("sampling_contradicts", "the samples contradict a recorded sampling setting", {
    "temperature": "temperature = {temperature:g} is recorded, but logprob + entropy averages {mean:.2g} nats instead of 0: {is_below_1} a filter that was not recorded, unless likely responses were selected",
    **{
        name: f"{name} = {{{name}:g}} is recorded, but it would have left out {{left_out:.1%}} of the tokens, judging by their logprobs and entropies"
        for name in ("top_p", "min_p")
    },
}, token_checks.ENTROPIES.replace("{name}", "train"), is_below_1={True: "neither pass applies it, or sampling applied", False: "sampling applied a lower one or"})  # fmt: skip
_VERSIONS_WRONG = data_fault("versions_wrong", "{name}'s policy versions do not match its weights", "for the same tokens with the same prefix, {name}'s logprobs differ by {size:.2g} nats from those of the same policy version at earlier steps (median, in the logit, over {num_tokens:,} repeated tokens), so {has_restarted}", BY_VERSION, has_restarted={
    True: "the version restarted, as after a resume, so it no longer identifies the weights",
    False: "the recorded version does not increase with each update, or is counted differently from the other pass's",
})  # fmt: skip
_NEVER_UPDATED = data_fault("engine_never_updated", "the engine's policy version never grows", "all {num:,} rows inspected after the first update were sampled with policy version {version}, while the trainer's grows to {latest}: the data were sampled beforehand, the trainer's weights never reach the engine, or nothing increments its version", BY_VERSION)  # fmt: skip

_UNCHANGED = data_fault("weights_unchanged", "the trainer's weights never change", "the policy version grows from {version} to {latest}, but train gives all {num_tokens:,} tokens that occur again at a later version, with the same prefix, bitwise the same logprobs, so no update changes the weights: the optimizer may have no parameters or the wrong ones, or the learning rate may be 0", BY_VERSION, hidden_by=("not_finite",))  # fmt: skip


def _versions(run: DataRows) -> Iterator[DataFinding]:
    """Find versions that do not match the weights, an engine without updates, and sampling settings not applied."""
    if run.sample is None or (data := _compared(run)) is None:
        return
    if unapplied := unapplied_setting(data):
        yield from run.find(_SAMPLING_CONTRADICTS, run.at >= 0, notice=True, **unapplied)
    if found := wrong_versions(data):
        (side, moved), known = found, np.unique(run.sample.steps)
        numbers: dict[str, Any] = {"num_tokens": moved.tokens, "size": moved.size, "name": data.names[side]}
        numbers["has_restarted"] = _has_restarted(getattr(run.sample, side), run.sample.steps)
        yield from run.find(_VERSIONS_WRONG, known >= moved.since, known, notice=True, **numbers)
        return
    trainer, engine = (side.versions.compressed() for side in (run.sample.a, run.sample.b))
    is_whole = run.database.steps == ALL_STEPS and min(len(trainer), len(engine))
    if is_whole and np.ptp(engine) == 0 and np.ptp(trainer) >= MIN_STOPPED:
        numbers, behind = {"version": int(engine[0]), "latest": int(trainer.max())}, data.updates_behind > 0
        yield from run.find(_NEVER_UPDATED, behind, sample=run.sample, notice=True, **numbers)
    versions, keys = run.sample.a.versions.filled(-1)[data.seq], run.sample.token_keys[data.keep]
    temperature = np.nan_to_num(run.sample.settings["temperature"])[data.seq]
    one, two = neighbours(np.lexsort((versions, keys, temperature)), keys, temperature)
    again = (versions[one] >= 0) & (versions[one] < versions[two]) & (data.rest[one] > MIN_REST)
    one, two, known = one[again], two[again], np.unique(run.sample.steps)
    is_known = len(one) >= MIN_REPEATS and len(np.unique(versions[two])) > 1 and not advantages.is_16_bit(data.a)
    has_gradient = not (run.rows["advantage"] == 0).all()
    if is_known and has_gradient and np.array_equal(data.a[one], data.a[two]):
        numbers = {"num_tokens": len(one), "version": int(versions[one].min()), "latest": int(versions[two].max())}
        yield from run.find(_UNCHANGED, known >= 0, known, **numbers)


def _has_restarted(side: PassSample, steps: np.ndarray) -> bool:
    """Return whether the policy version decreases at some step, as after a resume that counts from 0 again."""
    newest = [side.versions[steps == step].max() for step in np.unique(steps)]
    newest = [each for each in newest if each is not np.ma.masked]
    return any(later < earlier for earlier, later in itertools.pairwise(newest))


def _compared(run: DataRows) -> PairData | None:
    """Return the inspected tokens of train and rollout, or None if other passes are compared."""
    if run.sample is None or (run.sample.a.name, run.sample.b.name) != (TRAIN, ROLLOUT):
        return None
    return _pair_data(run.database, run.sample)


def _other_pass(database: Database, name: str, steps: str) -> PairData:
    return _pair_data(database, read_sample(database.of_steps(steps), (TRAIN, name), []))


def _pair_data(database: Database, sample: Sample) -> PairData:
    sums = PairSums(steps=np.zeros(0), columns={})
    return PairData(trace=database.given[0], sample=sample, sums=sums, keep=sample.compared)


def _place_numbers(run: DataRows, first: PairData) -> dict[str, Any]:
    """Describe the place in the run where the reference differs most. Empty if none stands out at the `first` step."""
    data = _other_pass(run.database, "reference", run.database.steps) if places(first) else None
    place = next((each for each in (places(data) if data else ()) if each.feature not in BY_TIME), None)
    if data is None or place is None:
        return {}
    inside, outside = (float(np.abs(data.d[there]).mean()) for there in (place.inside, ~place.inside))
    return {**place.numbers, "inside": inside, "outside": outside, "covered": float(place.inside.mean())}


def _moved(run: DataRows, name: str, data: PairData) -> Iterator[DataFinding]:
    """Find a pass whose values belong to other tokens from some step on, provided that train matches rollout."""
    own = run.sample
    if own is not None and pearson(own.a.logprobs[own.compared], own.b.logprobs[own.compared]) < 0.5:
        return
    found: dict[int, dict[str, Any]] = {}
    for _ in range(2):  # the second round narrows down the first bad step
        step_of = data.sample.steps[data.seq]
        found |= {int(step): _place_of(data.within(step_of == step)) for step in np.unique(step_of)}
        known = np.array(sorted(found))
        is_moved = np.array([bool(found[step]) for step in known])
        first = int(is_moved.argmax())
        if not is_moved.any() or is_moved[first:].mean() < 0.8:
            return
        if not first:
            break
        data = _other_pass(run.database, name, f"{known[first - 1]}:{known[first]}")
    yield from run.find(_REFERENCE_APART, is_moved, known, name=name, **found[int(known[first])])


def _place_of(data: PairData) -> dict[str, Any]:
    """Describe how the other pass's values are misplaced, with the mean |d| (nats). Empty if they are not."""
    size = float(np.abs(data.d).mean())
    if size < MIN_OFF_NATS or pearson(data.a, data.b) > 0.5:
        return {}
    if best := token_checks.best_lag(data.sample.a.logprobs, data.sample.b.logprobs, data.keep, data.sample.seq, LAGS):
        moved, own, lag = best
        direction = "late" if lag > 0 else "early"
        return {"signal": "shifted", "size": size, "lag": lag, "direction": direction, "moved": moved, "own": own}
    # A few rows resemble others by chance, and shifted rows with equal texts match each other. `best_lag` covers the
    # latter, because it counts each text once.
    fits = [each for each in find_placement(data) if each.tokens[data.keep].mean() > 0.5 and each.gain > PLACE_NATS]
    fits = [each for each in fits if (each.left or 0.0) < REALIGNED_SHARE and each.finding.signal != "moved_rows"]
    best_fit = max(fits, key=lambda each: each.gain, default=None)
    return {"signal": "other_tokens", "size": size, "finding": best_fit.finding} if best_fit else {}


_EQUAL_BY_STEP = "SELECT step, count(*) AS num_tokens, sum((d = 0)::INTEGER) AS num_equal FROM pair('{a}', '{b}') GROUP BY step ORDER BY step"
_RATIO_IS_ONE = data_fault("ratio_is_one", "the importance ratio is 1 by construction", "{a} and {b} are bitwise equal at all {num_tokens:,} tokens inspected; {case}", _EQUAL_BY_STEP, cases={
    "versions": "the weights of {a} are {lag} updates newer than those of {b}",
    "reused": "each batch is used several times, with updates in between",
    "dtypes": "{a} was computed in {dtypes_a}, {b} in {dtypes_b}",
    "clipped": "clipping has no effect, which is correct only with one update per batch",
})  # fmt: skip
_REFERENCE_IS_POLICY = data_fault("reference_is_policy", "the reference is the policy", "reference and train are bitwise equal at all {num_tokens:,} tokens inspected, in {num_steps:,} steps, so the KL is 0 by construction: either the reference shares the policy's weights, or no update has changed them", _EQUAL_BY_STEP, hidden_by=("weights_unchanged",))  # fmt: skip


def _ratios(run: DataRows) -> Iterator[DataFinding]:
    """Find importance ratios that are all 1 although weights were updated between the passes or the dtypes differ."""
    execute, sample = run.database.connection.execute, run.sample
    contracts = dict(execute("SELECT contract, contract_json FROM passes").fetchall())
    reuses = run.setting(r"(num_iterations|ppo_epochs|num_ppo_epochs|updates_per_batch)$", r"^(?![01](\.0)?$)")
    for a, b in (("current", "train"), ("train", "rollout"), ("reference", "train")):
        if not {a, b} <= {*scored_passes(run.database)}:
            continue
        if sample is not None and (sample.a.name, sample.b.name) == (a, b):
            differs = (sample.a.logprobs != sample.b.logprobs) & sample.compared
            of_step = sample.steps[sample.seq]
            if 2 * len(np.unique(of_step[differs])) >= len(np.unique(of_step)):
                continue
        rows = execute(_EQUAL.format(steps=run.inspected), {"a": a, "b": b}).fetchall()
        rows = [row for row in rows if row[3]] or rows  # weights change only between uses of a batch
        equal = [row for row in rows if row[1]]
        if 2 * len(equal) <= len(rows):
            continue
        step, is_equal = (np.array([row[at] for row in rows]) for at in (0, 1))
        find = partial(run.find, affected=is_equal, steps=step, a=a, b=b, num_tokens=sum(row[2] for row in equal))
        if a == "reference":
            yield from find(_REFERENCE_IS_POLICY, least=max(len(rows), 3), num_steps=len(rows), notice=True)
            continue
        *_, is_reused, lag, contract_a, contract_b = max(equal, key=lambda row: row[4])
        dtypes = [{*re.findall(r"\b(?:bfloat|float)\d+", str(contracts.get(key)))} for key in (contract_a, contract_b)]
        loss = read_loss(run.settings)
        # A single equal step is only a notice: if warm-up starts from a learning rate of 0, the first update does
        # not change the weights.
        is_notice = len(equal) < 2
        if lag > 0:
            numbers: dict[str, Any] = {"signal": "versions", "lag": lag}
        elif is_reused or (a == "current" and reuses):
            numbers = {"signal": "reused"}
        elif all(dtypes) and dtypes[0].isdisjoint(dtypes[1]):
            numbers = {"signal": "dtypes", "dtypes_a": ", ".join(dtypes[0]), "dtypes_b": ", ".join(dtypes[1])}
        elif a == "current" and loss is not None and loss.has_clip and loss.denominator == b:
            numbers, is_notice = {"signal": "clipped"}, True
        else:
            continue
        yield from find(_RATIO_IS_ONE, notice=is_notice, **numbers)


_FILTER = r"(^|[./])((use_)?dynamic_sampling|filter_groups([./]enable)?|filter_zero\w*|zero_variance_filter)$"


_FUNCTIONS_UNUSED = data_fault("reward_functions_unused", "some reward functions are not used", "{setting} is recorded, but rows have no reward from {names}, so these functions may not be called", "SELECT step, seq_id, rewards FROM {rows} WHERE cardinality(rewards) > 0 ORDER BY step", words=lambda n: {"names": " and ".join(n["names"])})  # fmt: skip
_OF_NOTHING = data_fault("rewards_of_nothing", "rewards that no reward function gave", "{num:,} rows have a reward although no reward function gave one", "SELECT step, seq_id, reward, rewards FROM {rows} WHERE reward IS NOT NULL ORDER BY step")  # fmt: skip


def _sums(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Write `weights` and earlier weights (`before`), by reward function, as sums. A constant has an empty name."""
    sums = {key: numbers[key].items() for key in ("weights", "before") if key in numbers}
    texts = {
        key: " + ".join(f"{weight:g} {name}".strip() for name, weight in terms if name or weight).replace("+ -", "- ")
        for key, terms in sums.items()
    }
    return texts | {"declared": ", ".join(f"{name} {weight:g}" for name, weight in numbers.get("declared", {}).items())}


_REWARDS_WEIGHTED = data_fault("rewards_weighted", "reward functions are not simply added", {
    "unlike_recorded": "the reward is {weights}, but the recorded weights are {declared}",
    "not_recorded": "the reward is {weights}, and no weights are recorded",
    "changed": "the reward is {weights}, but {before} at earlier steps",
}, BY_STEP, words=_sums)  # fmt: skip
_REWARDS_DIFFER = data_fault("rewards_differ", "the reward is not the sum of its parts", {
    "moved": "the reward is a weighted sum of the reward functions only with {rule}",
    "some": "the reward is {weights}, except in {num:,} rows, {is_one}",
}, words=lambda n: _sums(n) | advantages.rule_words(n), is_one={True: "where it is {value:g}", False: "where it differs"})  # fmt: skip


def _reward_parts(run: DataRows) -> Iterator[DataFinding]:
    """Compare the reward with the weighted sum of its parts, and each part with lengths and finish reasons."""
    names, parts, is_given = run.parts
    rows = np.flatnonzero(is_given)
    if not names:
        return
    setting = run.setting(r"(^|[./])reward_func(tion)?s$", r"^[^<{]*[,\s][^<{]*$")
    listed = [re.split("[:/.]", each)[-1] for each in re.split(r"[,\s\[\]()'\"]+", setting.partition(" = ")[2]) if each]
    if {*names} <= {*listed} and (lost := [each for each in dict.fromkeys(listed) if each not in names]):
        yield from run.find(_FUNCTIONS_UNUSED, is_given, setting=setting, names=lost, notice=True)
    step, reward, parts = run.rows["step"][rows], run.rows["reward"][rows], parts[rows]
    find = partial(run.find, rows=rows)
    missing = np.isfinite(reward) & np.isnan(parts).all(axis=1)
    # If rows without parts have different rewards, these come from another source, so the finding is only a notice.
    yield from find(_OF_NOTHING, missing, notice=len({*reward[missing]}) > 1)
    if np.isfinite(reward).sum() >= 20 and np.ptp(reward[np.isfinite(reward)]):
        yield from _part_causes(run, rows)
    there = np.isfinite(reward) & np.isfinite(parts).all(axis=1)
    if there.sum() < 20 or np.ptp(reward[there]) == 0:
        return
    least = (2.0**-8 if advantages.is_16_bit(reward[there]) else 1e-4) * np.abs(reward[there]).max()

    def weights_of(rewards: np.ndarray, rows: np.ndarray | bool = True) -> np.ndarray | None:
        """Return the weights and constant that reproduce every reward from its parts, or None if no such weights exist."""
        known = there & rows & np.isfinite(rewards)
        for constant in (0.0, 1.0) if known.any() else ():
            columns = np.c_[parts[known], np.full(known.sum(), constant)]
            found = np.linalg.lstsq(columns, rewards[known], rcond=None)[0]
            if np.abs(columns @ found - rewards[known]).max() < least:
                return np.asarray(np.round(found * np.r_[np.ones(len(names)), constant], 3))
        return None

    def by_name(weights: np.ndarray) -> dict[str, float]:
        return dict(zip((*names, ""), weights.tolist(), strict=True))

    declared = run.weights
    recorded = np.array([declared.get(name, np.nan) for name in names])
    if (weights := weights_of(reward)) is not None:
        used = np.abs(parts[there]).max(axis=0) > 0
        is_off = bool((np.abs(weights[:-1] - recorded)[used] > 0.01).any())
        if is_off or (not declared and (np.ptp(weights[:-1][used]) > 0.01 or weights[-1])):
            signal = "unlike_recorded" if declared else "not_recorded"
            numbers: dict[str, Any] = {"weights": by_name(weights), "declared": declared, "notice": not is_off}
            yield from find(_REWARDS_WEIGHTED, step > -1, signal=signal, **numbers)
        return
    steps, at = np.unique(step, return_inverse=True)
    is_exact_at_ends = all(weights_of(reward, step == end) is not None for end in (steps[0], steps[-1]))
    for since in steps[1:] if is_exact_at_ends else ():
        before, after = weights_of(reward, step < since), weights_of(reward, step >= since)
        if before is not None and after is not None:
            numbers = {"signal": "changed", "weights": by_name(after), "before": by_name(before)}
            yield from find(_REWARDS_WEIGHTED, step >= since, notice=not declared, **numbers)
            return
    for name, place in shifted(at).items():
        if weights_of(np.append(reward, np.nan)[place]) is not None:
            yield from find(_REWARDS_DIFFER, step > -1, signal="moved", rule=name)
            return
    usual = np.where(np.isnan(recorded), 1.0, recorded)
    off = there & (np.abs(parts @ usual - reward) > least)
    if 0 < off.sum() < 0.4 * there.sum():
        numbers = {"weights": by_name(np.r_[usual, 0.0]), "value": float(reward[off][0])}
        is_one = bool(np.ptp(reward[off]) == 0)
        yield from find(_REWARDS_DIFFER, off, signal="some", notice=True, is_one=is_one, **numbers)


_GRADES_ANSWER = re.compile(
    r"acc|answer|code|correct|exact|judge|math|outcome|pass|score|solve|success|task|verif", re.IGNORECASE
)
"""Reward functions by which the responses of a group are meant to differ."""
_PENALTY = re.compile(r"(?i)penal|overlong|repeti")


_FUNCTION_CONSTANT = data_fault("reward_function_constant", "some reward functions are constant", "{case} ({num:,} rows), while other reward functions vary", cases={"always": "{values}", "since": "from step {start} on, {name} always returns {value:g}"}, words=lambda n: {
    "values": " and ".join(
        f"{name} returns one value per step for all its rows" if value is None else f"{name} always returns {value:g}"
        for name, value in n.get("values", {}).items()
    )
})  # fmt: skip
_COUNT_MASKED = data_fault("rewards_count_masked", "a length penalty counts masked tokens", "{name} depends only on the number of response tokens, including tokens outside the loss, such as tool output, which {num:,} rows contain")  # fmt: skip
_OF_TRUNCATED = data_fault("rewards_of_truncated", "truncated responses all get the same reward", "{name} gives {value:g} to all {num:,} truncated responses, but to few finished ones", is_often_intended=True)  # fmt: skip
_DIFFER_BY_ONE = data_fault("groups_differ_by_one", "groups are kept because of one reward function", "in {num_groups:,} groups, rewards differ only in {name}, so {setting} has not filtered them out")  # fmt: skip


def _part_causes(run: DataRows, rows: np.ndarray) -> Iterator[DataFinding]:
    """Find reward functions that count masked tokens, value truncated rows equally, or alone keep groups past a filter."""
    names, parts, _ = run.parts
    length, loss_length = (np.nan_to_num(run.rows[name][rows]).astype(int) for name in ("length", "loss_length"))
    ended, cut = (run.ended[rows] == name for name in ("stop", "length"))
    has_tools = length > loss_length
    with np.errstate(over="ignore"):
        varies = [np.std(values[np.isfinite(values)]) if np.isfinite(values).any() else 0.0 for values in parts[rows].T]
    # A penalty may never apply, and the policy may always earn the maximum of a simple function.
    idle: dict[str, float | None] = {}
    for name, values in zip(names, parts[rows].T, strict=True):
        given, at = values[known := np.isfinite(values)], np.unique(run.at[rows][known], return_inverse=True)[1]
        if not len(given) or _PENALTY.search(name):
            continue
        is_by_step = (
            np.abs(given - mean_of(at, given)).max() <= TINY * np.abs(given).max() and np.bincount(at).min() >= 8
        )
        if np.ptp(given) == 0 and given[0] != 1:
            idle[name] = float(given[0])
        elif np.ptp(given) and is_by_step and at.max() >= 4 and len(np.unique(run.cell[rows][known])) > 2 * at.max():
            idle[name] = None
    if idle and any(varies):
        yield from run.find(_FUNCTION_CONSTANT, rows > -1, rows=rows, signal="always", values=idle, notice=True)
    for name, values in zip(names, parts.T, strict=True) if any(varies) else ():
        if name in idle:
            continue
        stuck = _stuck(run, np.sign(run.weights.get(name, 1.0)) * values) if np.isfinite(values).any() else None
        if stuck and not stuck[1] and not _PENALTY.search(name):
            start, value = int(run.steps[run.at[stuck[0]].min()]), float(values[stuck[0]][0])
            yield from run.find(_FUNCTION_CONSTANT, stuck[0], signal="since", start=start, name=name, value=value)
    for name, values, deviation in zip(names, parts[rows].T, varies, strict=True):
        known = np.isfinite(values)
        if not deviation:
            continue

        def is_function_of(count: np.ndarray, values: np.ndarray = values, known: np.ndarray = known) -> bool:
            alike = known & (count_of(count) > 1)
            filled = np.where(known, values, 0.0)
            off = np.abs(filled - mean_of(count, filled))[alike]
            return bool(2 * alike.sum() > known.sum() and (off <= TINY * np.abs(values[known]).max()).all())

        of_length = is_function_of(length)
        if of_length and has_tools.sum() >= 10 and not is_function_of(loss_length):
            yield from run.find(_COUNT_MASKED, known & has_tools, rows=rows, name=name, notice=True)
        same = known & cut
        # A length penalty is meant for truncated responses, and these seldom earn the reward for the right answer.
        if of_length or deviation == max(varies) or min(same.sum(), ended.sum()) < 8:
            continue
        value = float(values[same][0])
        if np.ptp(values[same]) == 0 and np.mean(values[ended] == value) < 0.15:
            yield from run.find(_OF_TRUNCATED, same, rows=rows, name=name, value=value, notice=True)
    if len(names) < 2 or not (is_filtered := run.switched_on(_FILTER)):
        return
    cell, filled = numbered(run.labels[rows], run.at[rows]), np.nan_to_num(parts[rows]).T
    differs = np.array([mean_of(cell, 1.0 * (np.abs(each - mean_of(cell, each)) > TINY)) > 0 for each in filled])
    alone = differs & (differs.sum(axis=0) == 1)
    for name, kept in zip(names, alone, strict=True):
        num = len(np.unique(cell[kept]))
        if num >= max(_SEVERAL, 0.05 * len(np.unique(cell))) and not _GRADES_ANSWER.search(name):
            numbers: dict[str, Any] = {"num_groups": num, "name": name, "setting": is_filtered}
            yield from run.find(_DIFFER_BY_ONE, kept, rows=rows, notice=True, **numbers)


_RETURNS = """
SELECT step, row, coalesce(reward, 'nan') AS reward, a, CASE WHEN isfinite(kl) THEN kl ELSE 0 END AS kl, place, coalesce(counts, true) AS counts FROM (
    SELECT step, row, reward, unnest(advantages)::DOUBLE AS a, unnest(kl) AS kl, unnest(response_mask) AS counts, generate_subscripts(advantages, 1) AS place
    FROM (SELECT *, row_number() OVER () AS row FROM sequences WHERE {asked}) LEFT JOIN (
        SELECT run, step, seq_id, list_transform(list_zip(train.logprobs, other.logprobs), lambda pair: pair[1]::DOUBLE - pair[2]) AS kl
        FROM scores AS train JOIN scores AS other USING (run, step, seq_id, iteration) WHERE train."pass" = 'train' AND other."pass" = $other AND iteration = 0
    ) USING (run, step, seq_id)) WHERE isfinite(a) ORDER BY step, row, place
"""
_RETURN_ERROR = 1e-4
"""Rounding error relative to the standard deviation of a step's advantages."""
_KL_JUMP = 5.0
"""Maximum factor by which a controller changes the KL coefficient between two steps."""


_OF_PASS = data_fault("advantages_of_pass", "distillation advantages {signal}", "in {num:,} rows, each token's advantage is {factor:.3g} times {lag} token's logprob difference {name} - train{case}, apart from a constant for each row", cases={
    "sign": ", so training moves the policy away from {name}", "other_tokens": "",
}, lag={0: "its", 1: "the previous", -1: "the next"}, signal={"sign": "have the wrong sign", "other_tokens": "belong to other tokens"})  # fmt: skip


def _distilled(run: DataRows, other: str, step: np.ndarray, row: np.ndarray, a: np.ndarray, kl: np.ndarray, place: np.ndarray) -> list[DataFinding] | None:  # fmt: skip
    """Return what is wrong with token advantages that are the logprob difference other - train of some token, up to a
    factor and a constant for each row. None if they are not."""
    rows, first = np.unique(row, return_index=True)
    for lag in (0, 1, -1) if kl.any() else ():
        at = np.arange(max(lag, 0), len(a) + min(lag, 0))
        at = at[(row[at - lag] == row[at]) & (place[at - lag] == place[at] - lag)]
        cells, cell = np.unique(row[at], return_inverse=True)
        fit = advantages.exact_fits(a[at], -kl[at - lag, None], cell) if len(at) else None
        if fit and fit.hold and advantages.is_constant(fit.slopes[:, 0]):
            factor = float(np.nanmedian(fit.slopes))
            affected = np.isin(rows, cells[fit.fits]) & (factor < 0 or lag != 0)
            numbers: dict[str, Any] = {"signal": "sign" if factor < 0 else "other_tokens", "factor": factor, "lag": lag}
            return [*run.find(_OF_PASS, affected, step[first], name=other, **numbers)]
    return None


_VARY = data_fault("advantages_vary", "advantages vary within responses", "in {num:,} rows, advantages vary within the response{case}", cases={
    "returns": "{setting}{factor}",
    "rows": ": in each row, they have mean 0 and standard deviation 1, as if they were normalised within the row, which removes its reward",
    "parts_of_rows": ": at each step, the values of later tokens are the same linear function of the first tokens' values in all rows, as if parts of rows, such as context-parallel shards, were normalised separately",
}, hidden_by=("advantages_misplaced",), is_often_intended=True, setting=", although {setting} implies one advantage per response", factor="; they decay by a factor of {factor:.4g} per token towards the start")  # fmt: skip


def _normalised_apart(run: DataRows, step: np.ndarray, row: np.ndarray, a: np.ndarray, place: np.ndarray) -> Iterator[DataFinding]:  # fmt: skip
    """Find token advantages that were normalised within each row, or within parts of rows."""
    first, cell, num = np.unique(row, return_index=True, return_inverse=True, return_counts=True)[1:]
    mean, spread = mean_of(cell, a)[first], rms_of(cell, a - mean_of(cell, a))[first]
    unit = np.fmin(np.abs(spread - 1), np.abs(spread * np.sqrt(num / np.maximum(num - 1, 1)) - 1))
    asked, is_normal = (num > 2) & (np.abs(mean) + spread > TINY), (np.abs(mean) < 1e-3) & (unit < 1e-3)
    if (asked & is_normal).sum() > 0.95 * asked.sum() >= 20:
        yield from run.find(_VARY, asked & is_normal, step[first], signal="rows")
        return
    # The first token whose value differs from the row's first value, if it directly follows tokens with that value.
    second, differs = 0 * first, np.flatnonzero(np.abs(a - a[first][cell]) > TINY * np.abs(a).max(initial=0))[::-1]
    second[cell[differs]] = differs
    values = np.bincount(np.unique(np.c_[cell, np.round(a, 6)], axis=0)[:, 0].astype(int))
    known = (second > 0) & (values <= np.minimum(8, num / 2)) & (place[second] == place[second - 1] + 1)
    if known.sum() > max(20, 0.5 * len(known)):
        fit = advantages.exact_fits(
            a[second][known], a[first][known, None], np.unique(step[first][known], return_inverse=True)[1]
        )
        if fit.fits.sum() >= max(3, 0.95 * len(fit.fits)) and np.ptp(fit.slopes[fit.fits]) > 1e-3:
            yield from run.find(_VARY, known, step[first], signal="parts_of_rows", notice=True)


def _outcomes(run: DataRows) -> Iterator[DataFinding]:
    """Find token advantages that do not follow their row's reward, in all rows or in those that end early."""
    reward, length, at = run.rows["reward"], run.rows["loss_length"], run.at
    known = np.isfinite(reward) & np.isfinite(run.rows["advantage"]) & (length > 0)

    def related(chosen: np.ndarray, reward: np.ndarray = reward) -> tuple[float, float]:
        """Return the correlation of rewards with last or mean advantages within steps, and the largest expected by chance."""
        chosen = np.flatnonzero(chosen & np.isfinite(reward))
        values = (each[chosen] for each in (reward, run.rows["outcome"], run.rows["advantage"]))
        r, *others = (each - mean_of(at[chosen], each) for each in values)
        is_known = len(chosen) >= 40 and np.ptp(r) > 0
        error = 4 / max(len(chosen), 1) ** 0.5
        return (max(np.nan_to_num([pearson(each, r) for each in others]), key=abs) if is_known else np.nan), error

    is_short = length < np.maximum.reduceat(length, np.unique(at, return_index=True)[1])[at]
    for part, early in {"shorter": is_short, "truncated": run.ended == "length"}.items():
        (here, error), (rest, _) = related(known & early), related(known & ~early)
        if abs(here) < error < 0.4 and rest > max(0.8, 4 * abs(here)):
            numbers: dict[str, Any] = {"correlation": here, "error": error, "scope": "step", "part": part, "rest": rest}
            yield from run.find(advantages.UNRELATED, known & early, notice=True, **numbers)
            return
    own, error = related(known)
    if abs(own) < error and known.sum() >= 200:
        moves = {name: np.append(reward, np.nan)[place] for name, place in shifted(at).items()}
        fits = {name: float(np.nan_to_num(related(known, moved)[0])) for name, moved in moves.items()}
        best = max(fits, key=fits.__getitem__)
        is_moved = fits[best] > max(0.5, 3 * error)
        numbers = {"correlation": own, "error": error, "scope": "step", "fit": fits[best]}
        if is_moved:
            yield from run.find(advantages.OF_OTHER_ROWS, known, rule=best, **numbers)
        else:
            yield from run.find(advantages.UNRELATED, known, notice=True, part="all", **numbers)


_RETURNS_MIXED = data_fault(*advantages.MIXED, cases={
    "masked_decay": "a decay of {factor:.4g} per token over masked tokens as well, as if these counted toward the loss",
    "kl_sign": "a KL term with the wrong sign: in units of the reward, the coefficient of the logprob difference train - reference is {coefficient:+.3g}, but {is_whole} at other steps",
    "kl_size": "a KL term with a different magnitude: in units of the reward, the coefficient of the logprob difference train - reference is {coefficient:+.3g}, but {is_whole} at other steps",
    "masked_end": "no share of the return before masked tokens, although advantages after these tokens follow the reward",
    "masked_kl": "the KL penalty of masked tokens, although these tokens do not count toward the loss",
    "lost": "no fixed relation to the next token's advantage and the KL penalty, although they have one at earlier steps",
}, hidden_by=("not_finite",), is_whole={True: "negative, as for a penalty,", False: "{elsewhere:+.3g}"})  # fmt: skip


def _returns(run: DataRows) -> Iterator[DataFinding]:
    """Fit a = gamma * next_a + c * (train - reference) + constant to the advantages of adjacent tokens, step by step.
    Find rows where the fit fails across masked tokens, and steps where it fails or c changes."""
    if not run.is_per_token:
        return
    scored = (name for name in scored_passes(run.database) if not name.startswith(REPLAY_PREFIX))
    others = {*scored} - {ROLLOUT, TRAIN, CURRENT, REFERENCE}
    is_distilled = bool(others or run.setting(advantages.ALGORITHM, "distil|opd"))
    for other in (*sorted(others), "reference"):
        table = run.database.connection.execute(_RETURNS.format(asked=run.asked), {"other": other}).fetchnumpy()
        step, row, reward, a, kl, place, counts = map(np.asarray, table.values())
        distilled = _distilled(run, other, *(each[counts] for each in (step, row, a, kl, place)))
        is_distilled |= distilled is not None
        yield from distilled or ()
    yield from () if is_distilled else _outcomes(run)  # a distillation need not use rewards
    before = np.cumsum(kl) - kl
    step, row, reward, a, kl, place, before = (each[counts] for each in (step, row, reward, a, kl, place, before))
    steps, starts = np.unique(step, return_index=True)
    rows, first = np.unique(row, return_index=True)
    at = step[first]
    leaks, resets, runs_on = np.zeros((3, len(step)), bool)
    gamma, size = np.full((2, len(steps)), np.nan)
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(step)], strict=True)):
        i = np.arange(start, end)
        last, i = i[np.diff(row[i], append=-1) != 0], i[:-1][np.diff(row[i]) == 0]
        near, error = place[i + 1] == place[i] + 1, _RETURN_ERROR * float(np.std(a[start:end]))
        if near.sum() < 8 or not error:
            continue
        terms = np.c_[a[i + 1], kl[i], np.ones(len(i))]
        fitted = np.linalg.lstsq(terms[near], a[i][near], rcond=None)[0]
        rest, outcome = a[i] - terms @ fitted, a - fitted[1] * kl
        gamma[number] = fitted[0] if np.std(rest[near]) < error else np.inf
        if np.isinf(gamma[number]) or fitted[0] < 0.5:
            continue
        off = ~near & (np.abs(rest) > 10 * error)
        leaks[i] = off & (np.abs(rest - fitted[1] * (before[i + 1] - before[i] - kl[i])) < 10 * error)
        gap, decay = place[i + 1] - place[i], min(float(fitted[0]), 1 - 1e-9)
        predicted = a[i + 1] * decay**gap + fitted[2] * (1 - decay**gap) / (1 - decay) + fitted[1] * kl[i]
        runs_on[i] = off & (decay < 0.999) & (np.abs(a[i] - predicted) < 10 * error)
        resets[i] = off & (len(i) > near.sum() and np.ptp(outcome[i][~near]) < 10 * error)
        slope = np.polyfit(reward[last], outcome[last], 1)[0] if np.std(reward[last]) > 0 else 0.0
        if slope > 0 and np.std(fitted[1] * kl[i][near]) > 100 * error:
            size[number] = fitted[1] / slope
    holds, fails, known = np.isfinite(gamma), np.isinf(gamma), np.flatnonzero(np.isfinite(size))
    factor = float(np.median(gamma[holds])) if holds.any() else 1.0
    affected = np.isin(rows, row[runs_on])
    yield from run.find(_RETURNS_MIXED, affected, at, least=8, notice=True, signal="masked_decay", factor=factor)
    per_token = factor if 0.5 < factor < 0.999 else None
    if (run.group_setting or per_token) and not is_distilled:
        numbers: dict[str, Any] = {"signal": "returns", "setting": run.group_setting, "factor": per_token}
        yield from run.find(_VARY, run.rows["is_per_token"], notice=True, **numbers)
    size, off, signal = size[known], size[known] > 0, "kl_sign"
    jumps = np.minimum.accumulate(np.abs(size[::-1]))[::-1][1:] > _KL_JUMP * np.maximum.accumulate(np.abs(size))[:-1]
    if not off.any() and jumps[2:-2].any():
        off, signal = np.arange(len(known)) > np.argmax(jumps), "kl_size"
    here, elsewhere = (float(np.median(size[each])) if each.any() else None for each in (off, ~off))
    numbers = {"coefficient": here, "elsewhere": elsewhere, "is_whole": elsewhere is None}
    is_lost = min(len(known), fails.sum()) > 4 and np.flatnonzero(holds)[-1] < np.argmax(fails)
    yield from run.find(_RETURNS_MIXED, np.isin(at, steps[known[off]]), at, least=8, signal=signal, **numbers)
    for affected, signal in (
        (np.isin(rows, row[resets]), "masked_end"), (np.isin(rows, row[leaks]), "masked_kl"),
        (np.isin(at, steps[fails & is_lost]), "lost"),
    ):  # fmt: skip
        yield from run.find(_RETURNS_MIXED, affected, at, least=8, signal=signal)
    yield from () if is_distilled else _normalised_apart(run, step, row, a, place)


FAULTS = {
    (fault.code, signal): fault
    for module in (vars(advantages), vars(metrics), vars(token_checks), globals())
    for fault in [*module.values()]
    if isinstance(fault, DataFault)
    for signal in fault.evidence
}
"""Code and signal of a data finding -> its fault."""
