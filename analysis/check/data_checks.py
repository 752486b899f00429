"""Check a run's rewards, advantages, groups, logged metrics and importance ratios.

Faults here can ruin training even if the two passes are comparable.

Shapes: N rows (sequences) in the run or in one step, S steps.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...schemas.loss import read_loss
from ..advice import Advice
from ..trace.columns import read_hyperparameters, scored_passes, sequence_columns
from ..trace.database import Database
from ..trace.ragged import array_of
from . import commands
from .features import pearson
from .sample import MAX_READ_TOKENS, MIN_UNSAMPLED_RUN, UNSAMPLED_NATS, PassSample, Sample, run_lengths
from .where import part_of_rows, rank_of

KINDS = {
    "not_finite": ("NaN or infinite {column}", "{num:,} values of {column} are NaN or infinite"),
    "rewards_constant": ("constant rewards", "every reward{after} is {value:g}, so there is nothing to learn"),
    "rewards_by_prompt": ("rewards do not depend on the response", "all {num:,} groups with different responses have equal rewards, although rewards differ between prompts, so there is nothing to learn within a group. Rewards may be cached by prompt"),
    "one_row_groups": ("group ids are unique per row", "each prompt has {rows_per_prompt:.3g} rows on average, but every row has its own group"),
    "groups_mix_prompts": ("groups mix prompts", "{num_groups:,} groups contain rows from several prompts, up to {most} in one group"),
    "prompts_split": ("prompts are split over groups", "each prompt's rows are split over {num_groups} groups per step, each with its own baseline"),
    "rows_alone": ("some groups contain a single row", "{num:,} rows are alone in their group although other rows in the step have the same prompt, so their baseline is their own reward"),
    "advantages_constant": ("constant advantages", "at {num_steps} steps, advantages are equal within each group (mean {value:g}) although rewards differ"),
    "advantages_inverted": ("advantages have the wrong sign", "advantages decrease as rewards increase: their correlation within groups is {correlation:.3f}"),
    "advantages_unequal": ("equal rewards in a group get different advantages", "{num:,} rows have a different advantage from the other rows with the same reward in their group{where}, so either rewards were changed after advantages were computed, or part of each group has its own baseline"),
    "advantages_of_equal": ("equal rewards get advantages", "in {num:,} groups all rewards are equal, yet the advantages are {size:.3g} instead of 0, which is rounding error divided by a tiny standard deviation"),
    "rows_lost": ("groups lost rows after their baseline was computed", "in {num:,} groups with fewer than {size} rows, the advantages do not sum to 0, unlike in complete groups, so rows were removed afterwards"),
    "rows_masked": ("rows without tokens in the loss", "{num:,} rows have advantages but no tokens in the loss"),
    "versions_ahead": ("the engine's policy version is ahead of the trainer's", "in {num:,} rows, the engine's policy version is {ahead} ahead of the trainer's, although the trainer does not have these weights yet, so one counter is wrong"),
    "advantages_mixed": ("some advantages follow a different rule", "in {num:,} rows, advantages have {rule}, while all other advantages follow the group's mean and scale"),
    "advantages_unrelated": ("advantages do not follow rewards", "the correlation between advantages and rewards within groups is {correlation:.3f} (up to {error:.2f} by chance)"),
    "rewards_of_other_rows": ("rewards belong to other rows", "advantages follow other rows' rewards ({explanation}: fit {fit:.4f}); as recorded, their correlation with rewards is {correlation:.3f} within groups"),
    "baseline": ("the baseline is not the group's mean", "advantages are rewards minus {explanation} (fit {fit:.4f}; with the group's mean {own:.4f})"),
    "baseline_unknown": ("advantages do not average 0 within groups", "the groups' mean advantages have a standard deviation of {between:.2f} times the rms advantage, and no known baseline fits"),
    "advantages_clipped": ("advantages are clipped", "advantages are clipped to {low:.3g} and {high:.3g} (fit {fit:.4f})"),
    "advantages_by_length": ("advantages are scaled by the response length", "advantages are rewards minus the group's mean, {explanation} (fit {fit:.4f}; without the length {own:.4f})"),
    "advantages_misplaced": ("advantages do not cover the whole response", "in {num:,} rows all tokens have the same advantage, except the {end} ones ({zeros:.3g} on average), which have 0"),
    "advantages_vary": ("advantages vary within responses", "in {num:,} rows advantages vary within the response, although {setting} implies one advantage per response"),
    "advantages_scaled": ("advantages have an unusual scale", "advantages are {factor:.3g} times the rewards minus the group's mean, which no usual normalisation explains"),
    "advantages_extreme": ("extreme advantages", "|advantage| reaches {largest:.4g} ({usual:.3g} is usual), and no baseline or normalisation gives more than {bound:.3g}"),
    "rewards_unequal": ("identical responses get different rewards", "{num:,} of {num_pairs:,} pairs of identical responses to the same prompt have different rewards; {explanation}"),
    "batch_repeats": ("batches repeat", "at {num_steps:,} steps, at least 90% of the prompts and responses are the same as at the previous step"),
    "advantages_unlike_settings": ("advantages contradict the recorded settings", "{setting} is recorded, but advantages are rewards minus the group's mean, {rule} by the group's standard deviation"),
    "metric_contradicts": ("a logged metric contradicts the rows", "{name} is logged as {logged:.4g} at step {step}, but the rows give {recorded:.4g}"),
    "metric_of_others": ("a logged metric averages other values", "{name} is logged as {logged:.4g} at step {step}, the mean of {of}, but all rows give {recorded:.4g}"),
    "ratio_is_one": ("the importance ratio is 1 by construction", "{a} and {b} are bitwise equal at all {num_tokens:,} tokens inspected; {reason}"),
    "padding_counts": ("padding after the end token counts toward the loss", "{num_tokens:,} tokens in {num_rows:,} rows repeat the end token and count toward the loss, although they were not sampled"),
    "samples_repeat": ("responses repeat", "{num:,} of {num_asked:,} responses to a known prompt occurred before, but judging by their logprobs, at most {expected:.0f} should repeat, so several rows share a seed or rows were reused"),
    "finish_contradicts": ("finish reasons contradict the tokens", "{num:,} rows have the wrong finish reason: {num_stop:,} have the full length {length} and no end token but say 'stop', and {num_length:,} are shorter and end with an end token but say 'length'"),
    "limit_exceeded": ("responses are longer than the recorded limit", "{num:,} rows have up to {length:,} tokens although max_tokens is {limit:,.0f}, so the engine runs with a different limit"),
    "tokens_after_end": ("tokens after the end token count toward the loss", "{num:,} of {of:,} rows have token {token} exactly {distance} tokens before their end and hardly anywhere else, so it ends the response, and all tokens after it, whether sampled or padding, count toward the loss"),
    "prompt_padding": ("prompts are recorded with padding", "{num:,} of {of:,} prompts begin with token {token} repeated, and no other prompt begins with a repeated token, so padding is recorded as part of the prompt"),
    "rewards_differ": ("the reward is not the sum of its parts", "the reward is not a weighted sum of the reward functions, but fits {explanation}"),
    "rewards_weighted": ("reward functions are not simply added", "the reward is {explanation}, {contrast}"),
    "metric_late": ("a logged metric belongs to another step", "at all {num:,} logged steps, {name} is logged one step {late} the rows that it averages, so values are assigned to the wrong step"),
    "reference_is_policy": ("the reference is the policy", "reference and train are bitwise equal at all {num_tokens:,} tokens inspected, in {num_steps:,} steps, so the KL is 0 by construction: either the reference shares the policy's weights, or no update has changed them"),
    "limit_contradicts": ("responses are cut before the recorded limit", "{num:,} rows have finish reason 'length' at {length:,} tokens, but max_tokens is {limit:,.0f}"),
    "entropies_in_bits": ("entropies are in bits", "at all entropy levels, the mean of -logprob is {ratio:.3f} (ln 2) times the entropy recorded for {name}, so the entropies are in bits, not nats"),
    "entropies_shifted": ("entropies belong to other positions", "-logprob correlates better with {name}'s entropy one position away ({best:.2f}) than with its own ({own:.2f}), so each entropy belongs to the {which} position"),
    "mask_cuts": ("the loss mask leaves out sampled tokens", "{num_tokens:,} sampled tokens at the {end} of {num_rows:,} rows do not count toward the loss"),
    "unsampled_count": ("tokens that were not sampled count toward the loss", "{num_tokens:,} consecutive tokens in {num_rows:,} rows, such as tool output, count toward the loss but were not sampled"),
}  # fmt: skip
"""Code -> title and sentence template, filled with the finding's numbers."""


Numbers = dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    code: str
    """A key of KINDS."""
    share: float
    """Affected share among the tested rows, pairs or steps."""
    since: int | None
    """First affected step, or None if that is the run's first step."""
    is_notice: bool
    """True if this can be intentional in a healthy run."""
    numbers: Numbers = field(default_factory=dict)
    next: Advice
    """SQL command that shows the finding."""

    @property
    def title(self) -> str:
        return KINDS[self.code][0].format(**self.numbers)


def data_text(finding: DataFinding) -> str:
    since = "" if finding.since is None else f", starting at step {finding.since}"
    return f"{KINDS[finding.code][1].format(**finding.numbers)} ({finding.share:.0%} affected{since})"


def data_findings(database: Database, sample: Sample | None) -> tuple[DataFinding, ...]:
    """Check the data at the selected steps. Tokens are inspected only at `sample`'s steps."""
    run = _Run(database, sample)
    checks = (
        _values, _groups, _advantages, _repeated, _metrics, _ratios, _unsampled, _samples, _versions, _masked, _finished,
        _entropies, _references, _reward_parts, _prompts, _after_end,
    )  # fmt: skip
    found = {finding.code: finding for check in checks if len(run.at) for finding in check(run)}
    kept = [finding for code, finding in found.items() if not found.keys() & _EXPLAINED_BY.get(code, set())]
    return tuple(sorted(kept, key=lambda finding: finding.is_notice))


_EXPLAINED_BY = {
    "advantages_extreme": {"advantages_scaled", "baseline"}, "baseline_unknown": {"advantages_extreme"},
    "advantages_vary": {"advantages_misplaced"}, "advantages_mixed": {"not_finite"},
    "advantages_scaled": {"advantages_by_length"}, "advantages_unequal": {"advantages_extreme"},
    "rows_lost": {"not_finite"}, "rewards_by_prompt": {"rewards_constant"},
}  # fmt: skip
"""Finding -> findings that make it redundant. It is left out if any of them is present."""
_LOST = "coalesce(NOT isfinite({}), false)"
_ZEROS = "coalesce(list_position(list_transform({}, lambda value: value <> 0), true) - 1, 0)"
_ROWS = f"""
SELECT step, coalesce("group", 0) AS "group", coalesce(prompt, 0) AS prompt, reward, length, prompt_length, is_cut, coalesce(advantage, list_avg(list)) AS advantage,
       coalesce(abs(advantage), greatest(abs(list_max(list)), abs(list_min(list)))) AS largest,
       coalesce(list_max(list) - list_min(list) > 1e-5 * largest, false) AS is_per_token,
       CASE WHEN list_unique(list) = 2 THEN len(list_filter(list, lambda value: value = 0)) ELSE 0 END AS num_zero,
       {_ZEROS.format("list")} AS zeros_first, {_ZEROS.format("list_reverse(list)")} AS zeros_last,
       {_LOST.format("reward")} AS lost_reward, {_LOST.format("coalesce(advantage, list_sum(list))")} AS lost_advantage
FROM (
    SELECT step, row_number() OVER () AS place, coalesce(lower(finish_reason) = 'length', false) AS is_cut, num_response_tokens::DOUBLE AS length, coalesce(len(prompt_ids), 0)::DOUBLE AS prompt_length, reward, advantage,
           CASE WHEN group_id IS NOT NULL THEN hash(group_id) END AS "group", CASE WHEN prompt_ids IS NOT NULL THEN hash(prompt_ids) END AS prompt, {{list}} AS list
    FROM sequences
)
ORDER BY step, place
"""
"""One row per sequence. Missing hashes are 0. `largest` and `is_per_token` only consider tokens in the loss."""
_RESPONSES = """
SELECT step, hash(prompt_ids, response_ids) AS response, row_number() OVER () AS place FROM sequences
WHERE {condition} ORDER BY step, place
"""
_COUNTED = "list_filter(advantages, lambda value, place: coalesce(response_mask[place], true))"
_BY_STEP = "SELECT step, avg(reward) AS reward, min(reward) AS lowest, max(reward) AS highest, avg(num_response_tokens) AS length, max(abs(advantage)) AS largest FROM {rows} GROUP BY step ORDER BY step"
_BY_GROUP = "SELECT step, group_id, count(*) AS n, count(DISTINCT prompt_ids) AS prompts, avg(reward) AS reward, avg(advantage) AS advantage, corr(reward, advantage) AS correlation FROM {rows} GROUP BY ALL ORDER BY step, group_id"
_BY_ROW = "SELECT step, group_id, seq_id, hash(prompt_ids, response_ids) AS response, reward, advantage FROM {rows} ORDER BY step"
_EQUAL_BY_STEP = "SELECT step, count(*) AS num_tokens, sum((d = 0)::INTEGER) AS num_equal FROM pair('{a}', '{b}') GROUP BY step ORDER BY step"
_BY_VERSION = 'SELECT step, "pass", policy_version, count(*) AS num_sequences FROM scores GROUP BY ALL ORDER BY ALL'
_ENTROPIES = "SELECT round(e, 1) AS entropy, avg(-p) AS surprise, count(*) AS n FROM (SELECT unnest(entropy) AS e, unnest(logprobs) AS p FROM scores WHERE \"pass\" = '{name}') GROUP BY ALL ORDER BY ALL"
_TOKENS = "SELECT position, token_id, mask, rollout_logprob, train_logprob FROM tokens WHERE step = {step} AND seq_id = '{seq_id}' ORDER BY position"
_ERRORS = 4.0
"""Random variation stays within this many standard errors even in a thousand steps."""
BATCH = "a constant for the whole batch"
_HALVES = "the mean over the row's half of the group"
_OF_OWN = {
    "clipped": "advantages_clipped", "divided by the response length": "advantages_by_length",
    "multiplied by the response length": "advantages_by_length", _HALVES: "baseline",
}  # fmt: skip
"""Rule -> code, for rules under which a group's advantages still sum to about 0."""
_IS_ALGORITHM = re.compile(r"adv|baseline|estimator|algorithm|loss_type", re.IGNORECASE)
_DIVIDES = re.compile(r"(^|[./])(scale_rewards|norm_adv_by_std_in_grpo|normali[sz]e_by_std)$")
_IS_ON = re.compile(r"^(group|true|1\.0)$", re.IGNORECASE)
_IS_OFF = re.compile(r"^(batch|none|false|0\.0)$", re.IGNORECASE)
_NAMES_GROUP = re.compile(r"grpo|rloo|group", re.IGNORECASE)
_NAMES_OTHER = re.compile(r"reinforce|gae|ppo|batch|global|running|critic|remax", re.IGNORECASE)
_WEIGHT = re.compile(r"([\w./-]+)\W+(-?\d+\.?\d*(?:e-?\d+)?)")
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
_REUSES = re.compile(r"(num_iterations|ppo_epochs|num_ppo_epochs|updates_per_batch)$", re.IGNORECASE)
_ERROR_OF_MEAN = "4 * stddev_pop(value) / sqrt(count(*))"
_LOGGED = (
    ("sequences", "reward", _ERROR_OF_MEAN, ("reward", "critic/score/mean", "critic/rewards/mean", "rewards/mean", "reward/mean", "train/reward", "rollout/raw_reward")),
    ("sequences", "num_response_tokens", _ERROR_OF_MEAN, ("completion_length", "completions/mean_length", "response_length/mean", "response_length", "rollout/response_lengths")),
    ("(FROM scores WHERE \"pass\" = 'train' AND iteration = 0 AND step IN ({steps}))", "list_avg(entropy)", "max(value) - min(value)", ("entropy", "actor/entropy", "train/entropy", "entropy/mean")),
)  # fmt: skip
"""Table, column, SQL for the tolerance, and the metric names that frameworks use for the column's mean."""
_MEANS = """
SELECT step, avg(value) AS mean, {error} AS error
FROM (SELECT step, {column}::DOUBLE AS value FROM {table}) WHERE isfinite(value) GROUP BY step ORDER BY step
"""


class _Run:
    def __init__(self, database: Database, sample: Sample | None) -> None:
        columns = sequence_columns(database)
        tokens = (_COUNTED if columns.mask else "advantages") if columns.advantages else "NULL"
        with database.following("reading rewards and advantages"):
            table = database.connection.sql(_ROWS.format(list=f"{tokens}::DOUBLE[]")).to_arrow_table()
        self.database, self.sample, self.settings = database, sample, read_hyperparameters(database)
        self.rows = {name: array_of(table[name]) for name in table.column_names}
        self.steps, self.at = np.unique(self.rows["step"], return_inverse=True)
        self.labels = self.rows["group" if self.rows["group"].any() else "prompt"]
        self.is_per_token = bool(self.rows["is_per_token"].any())
        self.sampled_at = np.searchsorted(self.steps, () if sample is None else sample.steps)
        inspected = self.steps if sample is None else np.unique(sample.steps)
        self.inspected = ", ".join(str(step) for step in inspected)

    def finding(
        self, code: str, affected: np.ndarray, at: np.ndarray, query: str, numbers: Numbers, *, notice: bool = False
    ) -> DataFinding:
        condition = self.database.step_condition()
        rows = f"(FROM sequences WHERE {condition})" if condition else "sequences"
        return DataFinding(
            code=code, share=float(np.mean(affected)), since=self.since(affected, at), is_notice=notice, numbers=numbers,
            next=commands.sql_of(self.database.given[0], query.format(rows=rows, **numbers)),
        )  # fmt: skip

    @cached_property
    def responses(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows have inspected tokens, [N] bool, and a hash over each row's prompt and response."""
        is_large = self.rows["length"].sum() > MAX_READ_TOKENS
        condition = f"step IN ({self.inspected})" if is_large else "true"
        read = self.database.connection.execute(_RESPONSES.format(condition=condition)).fetchnumpy()
        return np.isin(self.rows["step"], read["step"]), read["response"]

    def setting(self, name: re.Pattern[str], value: re.Pattern[str]) -> str:
        """Return the first setting whose name and value match, formatted as `name = value`, or an empty string."""
        given = ((key, str(each)) for key, each in self.settings.items())
        return next((f"{key} = {each}" for key, each in given if name.search(key) and value.search(each)), "")

    def since(self, affected: np.ndarray, at: np.ndarray) -> int | None:
        """Return the step at which a fault begins, or None if that is the run's first step."""
        judged, index = np.unique(at, return_inverse=True)
        is_bad = np.bincount(index, affected) > 0
        first = int(np.cumsum(np.where(is_bad, 1, -1)[::-1])[::-1].argmax())
        if 2 * is_bad[first:].sum() <= is_bad.sum():
            first = int(is_bad.argmax())
        return int(self.steps[judged[first]]) if first else None


def _values(run: _Run) -> Iterator[DataFinding]:
    rows, at = run.rows, run.at
    for column in ("reward", "advantage"):
        if (lost := rows[f"lost_{column}"]).any():
            query = "SELECT step, seq_id, {column} FROM {rows} WHERE NOT isfinite({column}) ORDER BY step"
            yield run.finding("not_finite", lost, at, query, {"column": column, "num": int(lost.sum())})
    for end in ("first", "last"):
        zeros, by_token = rows[f"zeros_{end}"], rows["is_per_token"]
        misplaced = by_token & (zeros > 0) & (zeros == rows["num_zero"])
        if 2 * misplaced.sum() > max(by_token.sum(), 8):
            numbers: Numbers = {"num": int(misplaced.sum()), "end": end, "zeros": float(zeros[misplaced].mean())}
            yield run.finding("advantages_misplaced", misplaced, at, _BY_ROW, numbers)
    declared = run.setting(_IS_ALGORITHM, _NAMES_GROUP)
    if declared and (vary := rows["is_per_token"]).any():
        yield run.finding("advantages_vary", vary, at, _BY_ROW, {"num": int(vary.sum()), "setting": declared})
    yield from _constant_rewards(run)
    yield from _rewards_by_prompt(run)
    rewards = rows["reward"][np.isfinite(rows["reward"])]
    # A value normalised over n values is at most sqrt(n); a reward minus a baseline is at most the range of the
    # rewards.
    size, units = np.nan_to_num(rows["largest"], posinf=0), np.where(rows["is_per_token"], rows["length"], 1.0)
    bound = 2 * np.maximum(np.sqrt(np.bincount(at, units)), 2 * np.abs(rewards).max(initial=0.0))[at]
    medians = [np.median(some) for _, part in _parts(at) if len(some := size[part][size[part] > 0])]
    usual = float(np.quantile(medians, 0.25)) if medians else 0.0
    if (extreme := (size > bound) & (size > 10 * usual)).any():
        numbers = {"largest": float(size.max()), "bound": float(bound[extreme].max()), "usual": usual}
        yield run.finding("advantages_extreme", extreme, at, _BY_STEP, numbers)


def _constant_rewards(run: _Run) -> Iterator[DataFinding]:
    rewards, at = run.rows["reward"], run.at
    known = np.isfinite(rewards)
    if known.sum() < 8:
        return
    value = float(rewards[known][-1])
    others = np.flatnonzero(known & (rewards != value))
    if not len(others):
        if known.sum() >= 30:  # any other reward then has a probability below 0.1
            yield run.finding("rewards_constant", at >= 0, at, _BY_STEP, {"value": value, "after": ""}, notice=True)
        return
    earlier = known & (at <= at[others[-1]])
    later = known & ~earlier
    usual = (1 + (rewards[earlier] == value).sum()) / (2 + earlier.sum())
    # Equal responses have equal rewards; only different ones are evidence.
    inspected, response = run.responses
    num_later = len(np.unique(response[later[inspected]]))
    if value < rewards[known].max() and num_later * np.log(usual) < np.log(1e-6):
        numbers: Numbers = {"value": value, "after": f" from step {run.steps[at[later].min()]} on"}
        yield run.finding("rewards_constant", later, at, _BY_STEP, numbers)


def _rewards_by_prompt(run: _Run) -> Iterator[DataFinding]:
    rewards, at = run.rows["reward"], run.at
    known = np.isfinite(rewards)
    if known.sum() < 8:
        return
    inspected, response = run.responses
    asked = known & inspected & (run.labels > 0)
    if not asked.any():
        return
    cell, reward, step = _numbered(run.labels[asked], at[asked]), rewards[asked], at[asked]
    unequal = np.abs(reward - mean_of(cell, reward)) > 1e-9 * np.abs(reward).max()
    within = step > (step[unequal].max() if unequal.any() else -1)
    pairs = np.unique(
        np.stack([cell.astype(np.uint64), response[asked[inspected]].astype(np.uint64)])[:, within], axis=1
    )[0]
    more = np.bincount(pairs.astype(np.int64)) - 1  # further responses of each group
    share = np.unique(reward[within], return_counts=True)[1] / max(within.sum(), 1)
    num, by_chance = int((more > 0).sum()), np.log(share.max(initial=0.0) or 1.0)
    if num >= 8 and np.maximum(more, 0).sum() * by_chance < np.log(1e-6):
        affected = np.zeros(len(at), bool)
        affected[np.flatnonzero(asked)[within]] = True
        found = run.finding("rewards_by_prompt", affected, at, _BY_GROUP, {"num": num}, notice=True)
        yield _fault_if_changed(found)


def _groups(run: _Run) -> Iterator[DataFinding]:
    known = (run.rows["group"] > 0) & (run.rows["prompt"] > 0)
    at = run.at[known]
    if not len(at):
        return
    group, prompt = (_numbered(run.rows[name][known], at) for name in ("group", "prompt"))
    cell = _numbered(group, prompt)
    firsts = np.unique(cell, return_index=True)[1]
    prompts, groups = np.bincount(group[firsts])[group], np.bincount(prompt[firsts])[prompt]
    in_group, repeated = count_of(group), count_of(prompt) > 1
    if in_group.max() == 1 and repeated.mean() > 0.5:
        yield run.finding("one_row_groups", repeated, at, _BY_GROUP, {"rows_per_prompt": len(at) / (prompt.max() + 1)})
        return
    # The turns of a conversation have different prompts. Wrong group ids join prompts that also occur elsewhere.
    all_repeat = mean_of(group, (count_of(cell) > 1).astype(float)) == 1
    mixed = (prompts > 1) & (all_repeat | (mean_of(group, (groups > 1).astype(float)) == 1))
    if mixed.any():
        numbers: Numbers = {"num_groups": len(np.unique(group[mixed])), "most": int(prompts.max())}
        yield run.finding("groups_mix_prompts", mixed, at, _BY_GROUP, numbers)
    elif (alone := (in_group == 1) & repeated & (in_group.max() > 1)).sum() >= 3:
        yield run.finding("rows_alone", alone, at, _BY_GROUP, {"num": int(alone.sum())})
    elif np.ptp(groups) == 0 and groups[0] > 1 and in_group.min() > 1 and prompt.max() + 1 > 3 * len(np.unique(at)):
        # If a few prompts were drawn twice by chance, others would be drawn once.
        yield run.finding("prompts_split", at >= 0, at, _BY_GROUP, {"num_groups": int(groups[0])}, notice=True)


def _numbered(label: np.ndarray, at: np.ndarray) -> np.ndarray:
    key = np.unique(label, return_inverse=True)[1] * (int(at.max()) + 1) + at
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[index])


def _advantages(run: _Run) -> Iterator[DataFinding]:
    known = np.isfinite(run.rows["reward"]) & np.isfinite(run.rows["advantage"])
    has_ids = bool(run.rows["group"].any())
    r, a, labels = run.rows["reward"][known], run.rows["advantage"][known], run.labels[known]
    at, length = run.at[known], run.rows["length"][known]
    if not len(at):
        return
    group = _numbered(labels, at)
    is_grouped = bool(np.mean((count_of(group) > 1) & (labels > 0)) > 0.5)
    explain = is_grouped and not run.is_per_token
    rules = _rules(r, a, group, at, length) if explain else {}
    if not has_ids and not any(rule.name == "own" for rule in rules.values()):
        is_grouped = explain = False  # rows with one prompt need not be a group
    if not explain:
        label = group if is_grouped else at
        rules = {
            step: rule_of(r[part], a[part], label[part], length[part], {}, explain=False) for step, part in _parts(at)
        }
    rules = {step: rule for step, rule in rules.items() if rule.name != "none"}

    def found(code: str, steps: Iterable[int], numbers: Numbers, *, notice: bool = False) -> DataFinding:
        judged = at[np.isin(at, [*rules])]
        return run.finding(code, np.isin(judged, [*steps]), judged, _BY_GROUP, numbers, notice=notice)

    constant = [step for step, rule in rules.items() if rule.name == "constant"]
    if sum(rules[step].freedom for step in constant) >= 4 and not run.is_per_token:
        value = float(a[np.isin(at, constant)].mean())
        is_same = np.ptp(a[np.isin(at, constant)]) == 0 and value != 0  # such as rows chosen for supervised training
        yield found("advantages_constant", constant, {"value": value, "num_steps": len(constant)}, notice=is_same)
    scaled = {step: rule.factor for step, rule in rules.items() if rule.factor is not None}
    factors = np.array([*scaled.values()])
    if 10 * len(scaled) > len(rules) and np.ptp(factors) < 0.1 * np.median(factors):  # groups may differ in scale
        yield _fault_if_changed(found("advantages_scaled", scaled, {"factor": float(np.median(factors))}, notice=True))
    if explain and not (set(rule.name for rule in rules.values()) - {"own"}):
        yield from _normalisation(run, r, a, group, at)
    others = Counter(rule.name for rule in rules.values() if rule.name not in ("own", "constant", ""))
    num_unknown = sum(rule.name == "" for rule in rules.values())
    name, num = others.most_common(1)[0] if others else ("", 0)
    if 2 * num < others.total() + num_unknown:
        name = ""  # with a few small steps, some rule fits by chance
    is_cut = run.rows["is_cut"][known]
    if explain and not name and (mixed := _mixed(r, a, group, at) or _unequal(r, a, group, at, is_cut, rules)):
        code, affected, mixed_numbers = mixed
        yield run.finding(code, affected, at, _BY_ROW, mixed_numbers)
        return
    off = {step: rule for step, rule in rules.items() if rule.name == name}
    freedom = sum(rule.freedom for rule in off.values())
    if not freedom:
        return
    values = a[np.isin(at, [*off])]
    correlation, error = sum(rule.correlation * rule.freedom for rule in off.values()) / freedom, _ERRORS / freedom**0.5
    numbers: Numbers = {
        **{key: float(np.median([getattr(rule, key) for rule in off.values()])) for key in ("fit", "own", "between")},
        "correlation": correlation, "error": error, "low": float(values.min()), "high": float(values.max()), "explanation": name,
    }  # fmt: skip
    if correlation < -(0.95 if name else 0.9 if run.is_per_token else 0.5) and correlation + error < 0:
        yield found("advantages_inverted", off, numbers)
    elif name == BATCH:
        # Where groups have one mean, both rules fit.
        off |= {
            step: rule
            for step, rule in rules.items()
            if rule.name == "own" and pearson(r[at == step], a[at == step]) > 0.999
        }
        declared = " ".join(str(value) for key, value in run.settings.items() if _IS_ALGORITHM.search(key))
        numbers["explanation"] = _constant(r, a, at, off)
        baseline = found("baseline", off, numbers, notice=not _NAMES_GROUP.search(declared))
        if baseline.since is not None or not _NAMES_OTHER.search(declared):
            yield _fault_if_changed(baseline)
    elif name in _OF_OWN:
        yield found(_OF_OWN[name], off, numbers, notice=name != _HALVES)
    elif name:
        yield found(
            "rewards_of_other_rows" if name.startswith(("rewards", "the rewards")) else "baseline", off, numbers
        )
    elif correlation + error < (0.5 if is_grouped else 0.1) and not run.is_per_token:
        yield found("advantages_unrelated", off, numbers)
    elif explain and 3 <= len(off) <= len(rules) - 3 and [*off] == [*rules][-len(off) :]:  # a change during the run
        yield found("baseline_unknown", off, numbers, notice=True)


def _normalisation(run: _Run, r: np.ndarray, a: np.ndarray, group: np.ndarray, at: np.ndarray) -> Iterator[DataFinding]:
    divides, keeps = run.setting(_DIVIDES, _IS_ON), run.setting(_DIVIDES, _IS_OFF)
    if not divides and not keeps:
        return
    centred, divided = _normalised(r, group, np.abs(r).max())
    centred = np.where(np.isfinite(divided), centred, np.nan)
    is_wrong, is_right = (np.zeros(at.max() + 1, bool) for _ in range(2))
    for step, part in _parts(at):
        fits = [_fit(given[part], a[part]) for given in (centred, divided)]
        if max(fits) > 0.999 and min(fits) < 0.99:
            is_divided = fits[1] > fits[0]
            is_wrong[step], is_right[step] = is_divided != bool(divides), is_divided == bool(divides)
    if is_wrong.any() and is_wrong.sum() > 9 * is_right.sum():
        numbers: Numbers = {"setting": divides or keeps, "rule": "not divided" if divides else "divided"}
        yield run.finding("advantages_unlike_settings", is_wrong[at], at, _BY_GROUP, numbers)


def _rules(
    r: np.ndarray, a: np.ndarray, group: np.ndarray, at: np.ndarray, length: np.ndarray
) -> dict[int, AdvantageRule]:
    parts, rules = [*_parts(at)], {}
    for place, (step, part) in enumerate(parts):
        beside = {"previous": place - 1, "next": place + 1}
        near = {name: r[parts[other][1]] for name, other in beside.items() if 0 <= other < len(parts)}
        near = {f"the rewards of the {name} step": each for name, each in near.items() if len(each) == len(r[part])}
        rules[step] = rule_of(r[part], a[part], group[part], length[part], near, explain=True)
    return rules


def _unequal(
    r: np.ndarray, a: np.ndarray, group: np.ndarray, at: np.ndarray, is_cut: np.ndarray, rules: dict[int, AdvantageRule]
) -> tuple[str, np.ndarray, Numbers] | None:
    """Find groups whose advantages have no consistent baseline.

    Either equal rewards have different advantages, or all rewards are equal and advantages are not 0, or advantages do
    not sum to 0 because rows were removed. Numbers in `group` [N] are unique across steps. Returns the code, the
    affected rows ([N] bool), and the numbers.
    """
    if any(rule.name in _OF_OWN for rule in rules.values()):
        return None  # advantages that depend on more than the rewards
    cell = np.unique(np.stack([group, r]), axis=1, return_inverse=True)[1]
    order = np.lexsort((a, cell))
    first, size = np.searchsorted(cell[order], cell), count_of(cell)
    usual = a[order][first + (size - 1) // 2]  # of two rows, either one may be off
    scale = np.sqrt(mean_of(group, (a - mean_of(group, a)) ** 2))
    asked = size > 1
    off = asked & (np.abs(a - usual) > 0.05 * np.maximum(scale, 1e-9))
    if 3 <= off.sum() < 0.34 * asked.sum():
        rank = rank_of(group)
        parts = {"with finish reason 'length'": is_cut}
        parts |= {f"from the group's row {place} on": rank >= place for place in range(2, int(rank.max()))}
        share = {
            name: off[part & asked].mean() if (part & asked).any() else 0.0
            for name, part in parts.items()
            if not off[~part].any()
        }
        where = max(share, key=share.__getitem__, default="")
        numbers: Numbers = {"num": int(off.sum()), "where": f", all of them {where}" if where else ""}
        return "advantages_unequal", off, numbers
    is_equal = np.sqrt(mean_of(group, (r - mean_of(group, r)) ** 2)) <= 1e-6 * np.abs(r).max()
    usual_size = float(np.median(np.abs(a[~is_equal]))) if (~is_equal).any() else np.inf
    of_group = mean_of(group, a)
    usual_mean = np.zeros(len(a))  # not 0 if advantages are whitened over tokens
    for _, part in _parts(at):
        usual_mean[part] = np.median(of_group[part][~is_equal[part]]) if not is_equal[part].all() else 0.0
    loose = is_equal & (count_of(group) > 1) & (np.abs(a - usual_mean) > 0.1 * usual_size)
    if off[~is_equal].any():  # advantages depend on more than the reward, which also spreads them in these groups
        loose &= scale < 1e-3 * np.abs(a)
    if loose.sum() > 0.5 * is_equal.sum() >= 3 and all(
        rule.name == "own" or rule.own > 0.99 for rule in rules.values()
    ):
        return (
            "advantages_of_equal",
            loose,
            {"num": len(np.unique(group[loose])), "size": float(np.median(np.abs(a[loose])))},
        )
    in_group, mean = count_of(group), np.abs(mean_of(group, a))
    full = in_group == in_group.max()
    lost = ~full & (mean > 0.05 * scale) & (scale > 0)
    if (
        0.2 < full.mean() < 1
        and mean[full].max() < 1e-3 * scale.max()
        and lost.sum() > 0.5 * (~full & (scale > 0)).sum() >= 3
    ):
        return "rows_lost", lost, {"num": len(np.unique(group[lost])), "size": int(in_group.max())}
    return None


def _mixed(r: np.ndarray, a: np.ndarray, group: np.ndarray, at: np.ndarray) -> tuple[str, np.ndarray, Numbers] | None:
    """Find rows whose sign or scale differs, rows with advantage 0, and steps where only some rows are divided by the
    standard deviation. Returns the same values as `_unequal`."""
    centred = r - mean_of(group, r)
    spread = np.sqrt(mean_of(group, centred**2))
    asked = (np.abs(centred) > 1e-3 * spread) & (spread > 1e-6 * np.abs(r).max())
    # No baseline gives 0 to two different rewards of a group.
    zero = asked & (a == 0)
    scatter = np.sqrt(mean_of(group[zero], (r[zero] - mean_of(group[zero], r[zero])) ** 2)) if zero.any() else r[zero]
    zeroed = np.isin(group, group[zero][scatter > 1e-3 * spread[zero]]) & np.isin(group, group[a != 0])
    if (zero & zeroed).sum() >= 3:
        return "advantages_mixed", zero, {"rule": "been set to 0 although their rewards differ", "num": int(zero.sum())}
    scales = {"centred": centred, "normalised": centred / np.where(spread > 0, spread, np.nan)}
    if asked.sum() < 30:
        return None

    def scale_of(given: np.ndarray) -> tuple[np.ndarray, float]:
        ratio = np.where(asked & (given != 0), a / np.where(given == 0, np.nan, given), np.nan)
        relative, sign = np.full(len(a), np.nan), np.sign(np.nansum(np.sign(ratio))) or 1.0
        for _, part in _parts(at):
            if (known := np.abs(ratio[part][np.isfinite(ratio[part])])).size and np.median(known):
                relative[part] = ratio[part] / np.median(known) * sign
        return relative, float(np.mean(np.abs(relative[asked] - 1) < 0.02))

    if any(scale_of(given)[1] > 0.97 for given in scales.values()):
        return None
    for given in scales.values():
        relative, usual = scale_of(given)
        other = asked & (np.abs(relative - 1) >= 0.02)
        factor = float(np.nanmedian(relative[other])) if other.any() else 1.0
        fits = np.abs(relative[other] - factor) < 0.02 * abs(factor)
        # A factor that applies to whole steps is reported with its first step.
        within = (mean_of(at, other * 1.0) / np.maximum(mean_of(at, asked * 1.0), 1e-9))[other]
        is_clear = usual >= 0.5 and other.mean() > 0.05 and fits.mean() > 0.9 and abs(factor - 1) > 0.1
        if is_clear and 0.05 < np.median(within) < 0.95:
            rule = "the wrong sign" if abs(factor + 1) < 0.02 else f"{factor:.3g} times the usual scale"
            return "advantages_mixed", other, {"rule": rule, "num": int(other.sum())}
    ratio = {name: np.abs(a - given) < 0.02 * np.abs(given) for name, given in scales.items()}
    if (rest := asked & ~ratio["centred"]).any():
        divided = a / np.where(asked, scales["normalised"], np.nan)
        factor = float(np.nanmedian(divided[rest]))  # 1, or less with Bessel's correction
        ratio["normalised"] = np.abs(divided / factor - 1) < 0.02 if 0.6 < factor < 1.5 else ratio["normalised"]
    only = {name: ratio[name] & ~ratio[other] & asked for name, other in itertools.permutations(scales)}
    if (
        min(each.sum() for each in only.values()) > 0.05 * asked.sum()
        and np.any([*ratio.values()], axis=0)[asked].mean() > 0.97
    ):
        fewer = min(only, key=lambda name: only[name].sum())
        rule = f"{'not ' if fewer == 'centred' else ''}been divided by the group's standard deviation"
        return "advantages_mixed", only[fewer], {"rule": rule, "num": int(only[fewer].sum())}
    return None


def _fault_if_changed(finding: DataFinding) -> DataFinding:
    return replace(finding, is_notice=finding.is_notice and finding.since is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """How advantages are computed from rewards in one step."""

    name: str
    """`own` for the group's mean, `constant`, a key in _OF_OWN, or the baseline or row order that fits, by name.
    Empty if nothing fits, `none` if rewards are equal within every group."""
    correlation: float = 0.0
    """Mean correlation between rewards and advantages within groups."""
    freedom: float = 0.0
    between: float = 0.0
    """Standard deviation between group mean advantages, relative to the rms advantage."""
    fit: float = 0.0
    """Correlation between the recorded advantages and those computed by the rule."""
    own: float = 0.0
    """`fit` with the group's mean as the baseline."""
    factor: float | None = None
    """Advantage scale, or None if a usual normalisation by group or batch explains it."""


def rule_of(
    r: np.ndarray,
    a: np.ndarray,
    label: np.ndarray,
    length: np.ndarray,
    near: Mapping[str, np.ndarray],
    *,
    explain: bool,
) -> AdvantageRule:
    """Find the rule that gives advantages [N] from rewards in one step. Without `explain`, only correlate the two.

    `label` holds [N] group labels in order, `length` [N] response tokens, and `near` [N] rewards from other steps.
    """
    g = label - label.min()
    n, x, y = count_of(g), r - mean_of(g, r), a - mean_of(g, a)
    spread, spread_a = np.sqrt(mean_of(g, x * x)), np.sqrt(mean_of(g, y * y))
    varies = spread > 1e-6 * np.abs(r).max()
    both = varies & (spread_a > 1e-6 * np.sqrt(mean_of(g, a * a)))
    if not both.any():
        return AdvantageRule(name="constant" if varies.any() else "none", freedom=float((1 - 1 / n[varies]).sum()))
    correlation = float(np.mean((x * y)[both] / (spread * spread_a)[both]))
    freedom = float((1 - 1 / n[both]).sum())
    if not explain:
        return AdvantageRule(name="own" if correlation > 0.1 else "", correlation=correlation, freedom=freedom)
    between = float(np.sqrt(np.mean((a - y - a.mean()) ** 2) / np.mean(a * a)))
    spread[~varies] = np.nan
    own = max(_fit(x, a), _fit(x / spread, a))
    # With any other baseline, group means scatter by at least about 1 / sqrt(n) of the advantages; with the group's
    # own, only by rounding.
    has_own = correlation > 0.5 and between < 0.1 / np.sqrt(np.median(n))
    others = {} if has_own and own > 0.99 else _others(r, a, g, spread, length, near)
    fits = {name: max(_fit(given, a) for given in scales) for name, scales in others.items()}
    name = max(fits, key=lambda each: round(fits[each], 3), default="")  # of ties, the first
    # A correct rule leaves less than 1% of the variance unexplained (eps, rounding), far less than the group mean
    # leaves.
    is_clear = bool(name) and fits[name] > 0.995 and own < 0.99 and 1 - fits[name] < (1 - own) / 4
    if has_own and not (is_clear and name in _OF_OWN):
        return AdvantageRule(name="own", factor=_factor(r, a, x, spread, n), correlation=correlation, freedom=freedom)
    return AdvantageRule(
        name=name if is_clear else "", correlation=correlation, freedom=freedom, between=between, fit=fits.get(name, 0.0), own=own
    )  # fmt: skip


def _others(
    r: np.ndarray, a: np.ndarray, g: np.ndarray, spread: np.ndarray, length: np.ndarray, near: Mapping[str, np.ndarray]
) -> dict[str, list[np.ndarray]]:
    def normalised(rewards: np.ndarray, label: np.ndarray) -> list[np.ndarray]:
        return _normalised(rewards, label, np.abs(r).max())

    means, n, order = np.bincount(g, r) / np.bincount(g), np.median(count_of(g)), np.empty(len(r), np.int64)
    order[np.lexsort((a, g))] = np.lexsort((r, g))
    rules = {
        BATCH: [r],
        **{name: normalised(rewards, g) for name, rewards in near.items()},
        "clipped": [np.clip(scale * normalised(r, g)[1], a.min(), a.max()) for scale in (1.0, np.sqrt(1 - 1 / n))],
        f"the mean of every {len(means)}th row": normalised(r, np.arange(len(r)) % len(means)),
        "rewards of the same group in another order": normalised(r[order], g),
        "divided by the response length": [each / length for each in normalised(r, g)],
        "multiplied by the response length": [each * length for each in normalised(r, g)],
    }
    rank = rank_of(g)
    if n >= 4:
        rules[_HALVES] = normalised(r, 2 * g + (2 * rank >= count_of(g)))
    for num in range(1, int(min(n, 17))):
        other = r - np.bincount(g, r * (rank < num))[g] / num
        of_part = np.sqrt(np.bincount(g, other**2 * (rank < num))[g] / num)
        rules[f"the mean of the group's first {num} rows" if num > 1 else "the reward of the group's first row"] = [
            other, other / spread, other / np.where(of_part > 0, of_part, np.nan),
        ]  # fmt: skip
    for name, by in (("previous", 1), ("next", -1)):
        other, of_other = (
            r - np.roll(means, by)[g],
            np.roll(np.sqrt(np.bincount(g, (r - means[g]) ** 2) / np.bincount(g)), by)[g],
        )
        rules[f"the {name} group's mean"] = [other, other / spread, other / np.where(of_other > 0, of_other, np.nan)]
    for by in (1, -1, 2, -2, 3, -3, 4, -4):
        rules[f"rewards {abs(by)} rows {'later' if by > 0 else 'earlier'}"] = normalised(np.roll(r, -by), g)
    return rules


def _normalised(rewards: np.ndarray, group: np.ndarray, largest: float) -> list[np.ndarray]:
    """Return rewards minus their group's mean, raw and divided by the group's standard deviation, [N] each. The latter
    is NaN if that deviation is only rounding error for a reward of size `largest`."""
    centred = rewards - mean_of(group, rewards)
    size = np.sqrt(mean_of(group, centred**2))
    return [centred, centred / np.where(size > 1e-6 * largest, size, np.nan)]


def _factor(r: np.ndarray, a: np.ndarray, x: np.ndarray, spread: np.ndarray, n: np.ndarray) -> float | None:
    few, size = max(int(n.min()), 2), float(np.nanmedian(spread))
    kept, of_batch = size / (size + 1e-4), float(np.std(x))  # eps is up to 1e-4
    x = np.where(np.isfinite(spread), x, np.nan)
    # Leave-one-out multiplies by n / (n - 1). The batch may be normalised over tokens instead of rows.
    usual = (
        (x / spread, kept * np.sqrt(1 - 1 / few), 1.0), (x, 1.0, few / (few - 1)), (x / np.std(r), 0.6, 1.8), (x / of_batch, 0.6, 1.8),
    )  # fmt: skip
    found = [(np.nansum(p * a) / np.nansum(p * p), low, high) for p, low, high in usual if _fit(p, a) > 0.999]
    is_usual = any(0.9 * low < factor < 1.1 * high for factor, low, high in found)
    return None if is_usual or not found else float(found[0][0])


def _constant(r: np.ndarray, a: np.ndarray, at: np.ndarray, steps: Collection[int]) -> str:
    means = np.array([r[part].mean() for _, part in _parts(at)])
    constants = {
        "the batch's mean": means, "nothing": 0.0 * means, "the previous step's mean": np.r_[0.0, means[:-1]],
        "the running mean": np.r_[0.0, np.cumsum(means)[:-1] / np.arange(1, len(means))],
    }  # fmt: skip
    names = Counter[str]()
    for place, (step, part) in enumerate(_parts(at)):
        if step in steps:
            slope, intercept = np.polyfit(r[part], a[part], 1)
            distances = {name: abs(intercept / slope + values[place]) for name, values in constants.items()}
            best = min(distances, key=distances.__getitem__)
            names[best if distances[best] < 0.01 * np.std(r[part]) else BATCH] += 1
    return names.most_common(1)[0][0]


def _parts(at: np.ndarray) -> Iterator[tuple[int, slice]]:
    steps, firsts = np.unique(at, return_index=True)
    for step, first, end in zip(steps, firsts, [*firsts[1:], len(at)], strict=True):
        yield int(step), slice(first, end)


def mean_of(label: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.asarray((np.bincount(label, values) / np.maximum(np.bincount(label), 1))[label])


def count_of(label: np.ndarray) -> np.ndarray:
    return np.asarray(np.bincount(label)[label])


def _fit(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation where x is finite, or 0 if there are fewer than 8 rows or one side is constant up to
    rounding."""
    x, y = x[known := np.isfinite(x)], y[known]
    if len(x) < 8:
        return 0.0
    dx, dy = x - x.mean(), y - y.mean()
    xx, yy = dx @ dx, dy @ dy
    is_constant = min(xx / max(x @ x, 1e-300), yy / max(y @ y, 1e-300)) < 1e-12
    return 0.0 if is_constant else float(dx @ dy / np.sqrt(xx * yy))


def _repeated(run: _Run) -> Iterator[DataFinding]:
    if not np.isfinite(run.rows["reward"]).any():
        return
    inspected, response = run.responses
    at, reward = run.at[inspected], run.rows["reward"][inspected]
    yield from _repeated_batches(run, at, response)
    order = np.lexsort((at, response))
    same = np.flatnonzero(response[order][1:] == response[order][:-1])
    one, two = order[same], order[same + 1]
    least = 1e-6 * np.abs(reward[np.isfinite(reward)]).max(initial=0.0)
    firsts, sizes, place = np.searchsorted(at, at), count_of(at), np.arange(len(at))
    moves = {f"rewards moved by {by} rows": firsts + (place - firsts + by) % sizes for by in range(-8, 9) if by}
    if np.ptp(sizes) == 0:
        for name, by in (("next", sizes[0]), ("previous", -sizes[0])):
            moves[f"the rewards of the {name} step"] = np.clip(place + by, 0, len(at) - 1)
    within = at[one] == at[two]
    for asked in (within, np.ones(len(within), bool)):
        differs = asked & (np.abs(reward[one] - reward[two]) > least)
        num = int(differs.sum())
        if num < 20:  # so few pairs may become equal by chance
            continue
        left = {
            name: int((asked & (np.abs(reward[moved[one]] - reward[moved[two]]) > least)).sum())
            for name, moved in moves.items()
        }
        move = min(left, key=left.__getitem__)
        is_moved = 10 * left[move] <= num
        if is_moved or asked is within:
            explanation = (
                f"with {move}, only {left[move]:,} do"
                if is_moved
                else "no shift of the rewards explains this, so the reward is random or belongs to other rows"
            )
            numbers: Numbers = {"num": num, "num_pairs": int(asked.sum()), "explanation": explanation}
            yield run.finding("rewards_unequal", differs, at[one], _BY_ROW, numbers, notice=not is_moved)
            return


def _repeated_batches(run: _Run, at: np.ndarray, response: np.ndarray) -> Iterator[DataFinding]:
    steps = np.unique(at)
    rows = {step: response[at == step] for step in steps}
    again = np.array([
        before in rows and len(np.unique(rows[step])) >= 8 and np.isin(rows[step], rows[before]).mean() >= 0.9
        for step, before in zip(steps, steps - 1, strict=True)
    ])  # fmt: skip
    if again.sum() >= 2:
        yield run.finding("batch_repeats", again, steps, _BY_ROW, {"num_steps": int(again.sum())}, notice=True)


def _metrics(run: _Run) -> Iterator[DataFinding]:
    query = "SELECT name, step, avg(value) FROM metrics WHERE isfinite(value) GROUP BY ALL"
    logged = {(name, step): value for name, step, value in run.database.connection.execute(query).fetchall()}
    known_names = {name for name, _ in logged}
    for table, column, error, names in _LOGGED:
        if known_names.isdisjoint(names):
            continue
        query = _MEANS.format(table=table.format(steps=run.inspected), column=column, error=error)
        rows = run.database.connection.execute(query).fetchnumpy()
        steps, mean, errors = rows["step"], rows["mean"], rows["error"]
        lags = itertools.product(filter(known_names.__contains__, names), (0, 1, -1))
        found = [each for name, later in lags if (each := _compared(logged, name, later, steps, mean, errors))]
        own = [each for each in found if not each.later and (each.is_sample or each.off.sum() > 2)]
        unlike = {each.name for each in own if each.is_sample}
        shifted = (each for each in found if each.later and each.name in unlike and len(each.ends) > 3)
        late = next((each for each in shifted if not each.off.any()), None)
        if late is not None and table == "sequences":
            numbers: Numbers = {
                "name": late.name,
                "late": "after" if late.later > 0 else "before",
                "num": len(late.ends),
            }
            at = np.searchsorted(run.steps, steps[late.ends])
            yield run.finding("metric_late", np.ones(len(at), bool), at, _BY_STEP, numbers, notice=True)
            continue
        explained = (
            (each, _logged_of(run, column, each.value[each.asked], mean[ends], steps[ends]))
            for each in own
            if len(ends := each.ends[each.asked])
        )
        other, of = next((pair for pair in explained if pair[1]), (None, ""))
        if other is not None:
            at = np.searchsorted(run.steps, steps[other.ends])
            numbers = other.worst(steps, mean, other.distance) | {"of": of}
            yield run.finding("metric_of_others", other.asked, at, _BY_STEP, numbers)
            continue
        best = min(found, key=lambda each: (each.is_sample, int(each.off.sum()), abs(each.later)), default=None)
        if best is not None and best.off.sum() > 2 and (not best.is_sample or 2 * best.off.sum() > len(best.off)):
            at = np.searchsorted(run.steps, steps[best.ends])
            numbers = best.worst(steps, mean, np.where(best.off, best.distance, -1.0))
            yield run.finding("metric_contradicts", best.off, at, _BY_STEP, numbers, notice=best.is_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logged:
    """A logged metric and the mean computed from the rows, at E steps."""

    name: str
    later: int
    """Delay (steps) between the rows and the logged metric."""
    ends: np.ndarray
    """[E] indices of the steps with a logged value."""
    value: np.ndarray
    distance: np.ndarray
    """[E] difference from the rows' mean at that step."""
    off: np.ndarray
    """[E] bool: the value contradicts the rows."""
    is_sample: bool
    """True if most values differ, which suggests that other rows were averaged."""

    @property
    def asked(self) -> np.ndarray:
        return self.distance > 0 if self.is_sample else self.off

    def worst(self, steps: np.ndarray, mean: np.ndarray, by: np.ndarray) -> Numbers:
        at = int(np.argmax(by))
        end = self.ends[at]
        return {
            "name": self.name, "logged": float(self.value[at]), "recorded": float(mean[end]), "step": int(steps[end]),
        }  # fmt: skip


def _compared(
    logged: Mapping[tuple[str, int], float],
    name: str,
    later: int,
    steps: np.ndarray,
    mean: np.ndarray,
    errors: np.ndarray,
) -> _Logged | None:
    every = np.array([logged.get((name, int(step) + later), np.nan) for step in steps])
    ends = np.flatnonzero(np.isfinite(every))
    if len(ends) <= 2:
        return None
    value = every[ends]
    since_last = np.diff(np.r_[0.0, np.cumsum(mean)[ends]]) / np.diff(np.r_[-1, ends])
    distance = np.abs(value - mean[ends])
    nearest = np.minimum(distance, np.abs(value - since_last))
    off = nearest > 1e-3 * np.abs(mean).max(initial=1e-9)
    at_end, most = bool(off[off.argmax() :].all()), 2 * int(off.sum()) >= len(off)
    is_sample = most and not (at_end and off.argmax() >= 2)
    # Logged means that are exact only at scattered steps were computed over other rows and match by chance.
    if most or not at_end:
        off &= nearest > np.maximum(errors, errors.mean())[ends]
    return _Logged(name=name, later=later, ends=ends, value=value, distance=distance, off=off, is_sample=is_sample)


def _logged_of(run: _Run, column: str, value: np.ndarray, mean: np.ndarray, steps: np.ndarray) -> str:
    if len(steps) < 3 or not np.ptp(mean):
        return ""
    factor = float(np.median(value / np.where(mean == 0, np.nan, mean)))
    if np.isfinite(factor) and abs(factor - 1) > 0.02 and np.allclose(mean * factor, value, rtol=1e-3):
        return f"all rows times {factor:.4g}" + (
            " (bits instead of nats)" if abs(factor * np.log(2) - 1) < 0.01 else ""
        )
    if column not in ("reward", "num_response_tokens"):
        return ""
    values = run.rows["reward" if column == "reward" else "length"]
    parts: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "the first half of the rows": lambda each: each[: len(each) // 2],
        "the first quarter of the rows": lambda each: each[: len(each) // 4],
        "every other row": lambda each: each[::2],
    }
    options = {name: (values, chosen) for name, chosen in parts.items()}
    if column != "reward":
        options["prompt and response"] = (values + run.rows["prompt_length"], lambda each: each)
    for name, (given, chosen) in options.items():
        if np.allclose(
            [np.mean(chosen(given[run.steps[run.at] == step])) for step in steps], value, rtol=1e-4, atol=1e-6
        ):
            return name
    return ""


_EQUAL = """
SELECT a.step, bool_and(a.logprobs = b.logprobs) AS equal, sum(len(a.logprobs)) AS num, a.iteration > 0 AS is_reused,
       coalesce(max(a.policy_version - coalesce(b.policy_version, s.policy_version)), 0) AS lag,
       any_value(a.contract) AS contract_a, any_value(b.contract) AS contract_b
FROM scores AS a JOIN scores AS b USING (run, step, seq_id) JOIN sequences AS s USING (run, step, seq_id)
WHERE a."pass" = $a AND b."pass" = $b AND b.iteration = 0 AND a.step IN ({steps})
GROUP BY ALL ORDER BY a.step
"""


def _equal(run: _Run, a: str, b: str) -> list[tuple[Any, ...]]:
    if not {a, b} <= {*scored_passes(run.database)}:
        return []
    if (sample := run.sample) is not None and (sample.a.name, sample.b.name) == (a, b):
        differs = np.not_equal(sample.a.logprobs, sample.b.logprobs) & sample.compared
        steps, place = np.unique(np.repeat(sample.steps, sample.lengths), return_inverse=True)
        if 2 * np.sum(np.bincount(place, differs) > 0) >= len(steps):
            return []
    return run.database.connection.execute(_EQUAL.format(steps=run.inspected), {"a": a, "b": b}).fetchall()


def _ratios(run: _Run) -> Iterator[DataFinding]:
    """Find importance ratios that are all 1 although the weights were updated in between or the dtypes differ."""
    uses = [str(value) for name, value in run.settings.items() if _REUSES.search(name)]
    contracts = dict(run.database.connection.execute("SELECT contract, contract_json FROM passes").fetchall())
    for a, b in (("current", "train"), ("train", "rollout")):
        rows = _equal(run, a, b)
        rows = [row for row in rows if row[3]] or rows  # a reused batch has seen updates in between
        equal = [row for row in rows if row[1]]
        if 2 * len(equal) <= len(rows):
            continue
        *_, is_reused, lag, contract_a, contract_b = max(equal, key=lambda row: row[4])
        dtypes = [{*re.findall(r"\b(?:bfloat|float)\d+", str(contracts.get(key)))} for key in (contract_a, contract_b)]
        is_notice = False
        if lag > 0:
            reason = f"the weights of {a} are {lag} updates newer"
        elif is_reused or (a == "current" and not {*uses} <= {"0", "1", "0.0", "1.0"}):
            reason = "each batch is used several times, with updates in between"
        elif all(dtypes) and dtypes[0].isdisjoint(dtypes[1]):
            reason = f"{a} was computed in {', '.join(dtypes[0])}, {b} in {', '.join(dtypes[1])}"
        elif (
            a == "current" and (loss := read_loss(run.settings)) is not None and loss.has_clip and loss.denominator == b
        ):
            reason, is_notice = "clipping has no effect, which is correct only with one update per batch", True
        else:
            continue
        numbers: Numbers = {"a": a, "b": b, "num_tokens": sum(row[2] for row in equal), "reason": reason}
        # If warm-up starts from a learning rate of 0, the first update does not change the weights.
        is_notice |= len(equal) < 2
        steps, is_equal = (np.array(column) for column in list(zip(*rows, strict=True))[:2])
        at = np.searchsorted(run.steps, steps)
        yield run.finding("ratio_is_one", is_equal, at, _EQUAL_BY_STEP, numbers, notice=is_notice)


def _references(run: _Run) -> Iterator[DataFinding]:
    rows = _equal(run, "reference", "train")
    if len(rows) >= 3 and all(row[1] for row in rows):
        numbers: Numbers = {
            "a": "reference",
            "b": "train",
            "num_tokens": sum(row[2] for row in rows),
            "num_steps": len(rows),
        }
        at = np.searchsorted(run.steps, np.array([row[0] for row in rows]))
        yield run.finding("reference_is_policy", np.ones(len(rows), bool), at, _EQUAL_BY_STEP, numbers, notice=True)


def _reward_parts(run: _Run) -> Iterator[DataFinding]:
    query = f"SELECT step, row_number() OVER () AS place, reward, map_keys(rewards), map_values(rewards) FROM sequences WHERE rewards IS NOT NULL AND step IN ({run.inspected}) ORDER BY step, place"
    rows = run.database.connection.execute(query).fetchall()
    names = rows[0][3] if rows else None
    if not names or len(names) < 2 or any(row[3] != names for row in rows):
        return
    reward = np.array([np.nan if row[2] is None else row[2] for row in rows], float)
    parts = np.array([[np.nan if each is None else each for each in row[4]] for row in rows], float)
    at = np.searchsorted(run.steps, np.array([row[0] for row in rows]))
    there = np.isfinite(reward) & np.isfinite(parts).all(axis=1)
    if there.sum() < 20 or np.ptp(reward[there]) == 0:
        return
    least = 1e-4 * np.abs(reward[there]).max()

    def weights_of(rewards: np.ndarray, rows: np.ndarray = there) -> np.ndarray | None:
        """Return the weights and constant that reproduce every reward from its parts, or None if no such weights exist."""
        known = rows & np.isfinite(rewards)
        if not known.any():
            return None
        for constant in (0.0, 1.0):
            columns = np.c_[parts[known], np.full(known.sum(), constant)]
            found, *_ = np.linalg.lstsq(columns, rewards[known], rcond=None)
            if np.abs(columns @ found - rewards[known]).max() < least:
                return np.asarray(found * np.r_[np.ones(len(found) - 1), constant])
        return None

    given = str(run.settings.get("reward_weights", ""))
    listed = _NUMBER.findall(given)
    if given.startswith("[") and len(listed) == len(names):  # TRL lists them in the order of the functions
        declared = dict(zip(names, map(float, listed), strict=True))
    else:
        declared = {name: float(number) for name, number in _WEIGHT.findall(given)}
    everywhere = np.ones(len(reward), bool)
    if (found := weights_of(reward)) is not None:
        *weights, constant = (round(float(weight), 3) for weight in found)
        used = np.abs(parts[there]).max(axis=0) > 0
        off = [
            abs(weight - declared.get(name, weight)) > 0.01
            for weight, name in zip(np.array(weights)[used], np.array(names)[used], strict=True)
        ]
        explanation = " + ".join(f"{weight:g} {name}" for weight, name in zip(weights, names, strict=True))
        explanation += f" + {constant:g}" if constant else ""
        if any(off) or (not declared and (np.ptp(np.array(weights)[used]) > 0.01 or constant)):
            recorded = ", ".join(f"{name} {weight:g}" for name, weight in declared.items())
            contrast = f"but the recorded weights are {recorded}" if declared else "and no weights are recorded"
            numbers: Numbers = {"explanation": explanation, "contrast": contrast}
            yield run.finding("rewards_weighted", everywhere, at, _BY_STEP, numbers, notice=not any(off))
        return
    since = _first_change([weights_of(reward, there & (at == step)) for step in range(at.max() + 1)])
    before, after = (weights_of(reward, there & part) for part in (at < since, at >= since))
    if before is not None and after is not None:
        texts = [
            " + ".join(f"{weight:.3g} {name}" for weight, name in zip(each, names, strict=False))
            for each in (after, before)
        ]
        numbers = {"explanation": texts[0], "contrast": f"but {texts[1]} at earlier steps"}
        yield run.finding("rewards_weighted", at >= since, at, _BY_STEP, numbers, notice=not declared)
        return
    firsts, sizes, place = np.searchsorted(at, at), count_of(at), np.arange(len(at))
    tried = {
        f"those of the row {abs(by)} {'later' if by > 0 else 'earlier'}": reward[firsts + (place - firsts - by) % sizes]
        for by in (1, -1, 2, -2, 3, -3, 4, -4)
    }
    if np.ptp(sizes) == 0:
        tried["those of the previous step"] = np.r_[reward[sizes[0] :], np.full(sizes[0], np.nan)]
    explanation = next((name for name, moved in tried.items() if weights_of(moved) is not None), "")
    total = np.nansum(parts * [declared.get(name, 1.0) for name in names], axis=1)
    if not explanation and np.abs(np.trunc(total[there]) - reward[there]).max() < least:
        explanation = "their sum truncated to an integer"
    if explanation:
        yield run.finding("rewards_differ", everywhere, at, _BY_ROW, {"explanation": explanation})


def _first_change(weights: list[np.ndarray | None]) -> int:
    """Return the first step whose weights differ from the first step's, or 0 if all agree or the first has none."""
    first = weights[0] if weights else None
    if first is None:
        return 0
    return next((step for step, each in enumerate(weights) if each is None or np.abs(each - first).max() > 0.01), 0)


def _prompts(run: _Run) -> Iterator[DataFinding]:
    if (sample := run.sample) is None:
        return
    at = run.sampled_at
    prompts = [each or [] for each in sample.prompts]
    known = np.array([len(each) > 3 for each in prompts])
    again = np.array([len(each) > 3 and each[0] == each[1] for each in prompts])
    if known.sum() < 8 or again.sum() < max(4, 0.3 * known.sum()):
        return
    ids, counts = np.unique([prompts[row][0] for row in np.flatnonzero(again)], return_counts=True)
    if counts.max() > 0.9 * counts.sum():
        numbers: Numbers = {"num": int(again.sum()), "of": int(known.sum()), "token": int(ids[counts.argmax()])}
        yield run.finding("prompt_padding", again, at, _BY_ROW, numbers)


def _after_end(run: _Run) -> Iterator[DataFinding]:
    if (sample := run.sample) is None:
        return
    at = run.sampled_at
    from_end = sample.lengths[sample.seq] - 1 - sample.position
    rows = sample.lengths > 0
    for distance in range(1, 9):
        there = (from_end == distance) & sample.mask
        ids, counts = np.unique(sample.tokens[there], return_counts=True)
        if not len(ids):
            continue
        token = ids[counts.argmax()]
        everywhere = sample.tokens == token
        affected = np.isin(np.arange(len(at)), sample.seq[there & everywhere])
        last = np.unique(sample.tokens[sample.starts[1:][affected] - 1], return_counts=True)[1]
        # A token that merely precedes the end token is always followed by that id; what follows the end varies.
        is_end = counts.max() >= max(12, 0.2 * rows.sum()) and counts.max() > 0.9 * everywhere.sum()
        if is_end and last.max() < 0.5 * last.sum():
            numbers: Numbers = {
                "num": int(counts.max()), "of": int(rows.sum()), "token": int(token), "distance": distance,
            }  # fmt: skip
            yield run.finding("tokens_after_end", affected, at, _BY_ROW, numbers)
            return


def _sampled_by(run: _Run) -> tuple[Sample, PassSample, PassSample] | None:
    """Return the sample, its engine pass and its other pass, or None if there is no engine pass."""
    sample = run.sample
    if sample is None or "rollout" not in (sample.a.name, sample.b.name) or not len(sample.tokens):
        return None
    return (sample, sample.a, sample.b) if sample.a.name == "rollout" else (sample, sample.b, sample.a)


def _repeats_end(sample: Sample) -> np.ndarray:
    """Return which tokens at the row's end only repeat the previous token, [N] bool."""
    last_other = sample.starts[:-1] - 1
    differs = sample.tokens != sample.tokens[np.maximum(sample.starts[1:] - 1, 0)][sample.seq]
    np.maximum.at(last_other, sample.seq[differs], np.flatnonzero(differs))
    return np.asarray(np.arange(len(sample.tokens)) > last_other[sample.seq] + 1)


def _unsampled(run: _Run) -> Iterator[DataFinding]:
    if (found := _sampled_by(run)) is None:
        return
    sample, engine, other = found
    seq, tokens = sample.seq, sample.tokens
    certain = (engine.logprobs == 0) & (other.logprobs < 0)
    if certain.any() and other.logprobs[certain].mean() > -0.1:  # probabilities rounded to 1
        certain[:] = False
    entropy = next((side.entropy for side in (other, engine) if side.entropy is not None), np.nan)
    with np.errstate(invalid="ignore"):
        unlikely = np.fmax(engine.logprobs, other.logprobs) + entropy < UNSAMPLED_NATS
    missing = sample.mask & (certain | ~np.isfinite(engine.logprobs))
    known = np.isfinite(other.logprobs) & sample.mask
    if (missing & known).any() and (known & ~missing).any():
        inside, usual = (float(np.mean(other.logprobs[part & known])) for part in (missing, ~missing))
        if inside > min(1.5 * usual, usual - 1):
            return  # these tokens were sampled, and the engine's logprobs are lost or belong to other rows
    odd = missing | (sample.mask & unlikely)
    repeats_end = _repeats_end(sample)
    padding, odd = odd & repeats_end, odd & ~repeats_end
    size = run_lengths(odd, seq)
    inside = odd & (size >= MIN_UNSAMPLED_RUN) & (size < sample.lengths[seq])
    if (missing & (padding | inside)).sum() < 0.9 * missing.sum():
        return  # sampled tokens lack logprobs, too
    at = run.sampled_at
    for code, found in (("padding_counts", padding), ("unsampled_count", inside)):
        rows, counts = np.unique(seq[found]), np.unique(tokens[found], return_counts=True)[1]
        if len(rows) < max(3, 0.05 * sample.num_sequences) or (found is padding and counts.max() < 0.9 * counts.sum()):
            continue
        numbers: Numbers = {
            "num_tokens": int(found.sum()), "num_rows": len(rows), "seq_id": sample.seq_ids[rows[0]].replace("'", "''"),
            "step": int(sample.steps[rows[0]]),
        }  # fmt: skip
        yield run.finding(code, np.isin(np.arange(len(at)), rows), at, _TOKENS, numbers)


def _samples(run: _Run) -> Iterator[DataFinding]:
    if (found := _sampled_by(run)) is None:
        return
    sample, engine, _ = found
    starts, at = sample.starts[:-1], run.sampled_at
    full = np.flatnonzero(sample.lengths)
    prompt, whole = sample.prefix_keys[starts[full]], sample.token_keys[starts[full] + sample.lengths[full] - 1]
    _, firsts, which = np.unique(whole, return_index=True, return_inverse=True)
    again = firsts[which] != np.arange(len(full))
    earlier = rank_of(prompt)
    asked = (earlier > 0) & np.array([sample.prompts[row] is not None for row in full], bool)
    # Sampling may be sharper than the recorded distribution: halving logprobs allows for a temperature of about 0.5.
    probability = np.exp(np.add.reduceat(np.nan_to_num(engine.logprobs, posinf=0.0, neginf=-1e4), starts[full]) / 2)
    expected = float(-np.expm1(earlier[asked] * np.log1p(-np.minimum(probability[asked], 1 - 1e-9))).sum())
    temperature = sample.settings["temperature"]
    is_greedy = np.all((temperature == 0) | (sample.settings["top_k"] == 1))
    if (num := int(again[asked].sum())) > 3 + 3 * expected and not is_greedy:
        numbers: Numbers = {"num": num, "num_asked": int(asked.sum()), "expected": expected}
        notice = not np.isfinite(temperature).any()
        yield run.finding("samples_repeat", again[asked], at[full][asked], _BY_ROW, numbers, notice=notice)


def _versions(run: _Run) -> Iterator[DataFinding]:
    if (found := _sampled_by(run)) is None:
        return
    _, engine, other = found
    ahead = (engine.versions - other.versions).filled(0)
    if other.name == "train" and (wrong := ahead > 0).mean() > 0.05:
        numbers: Numbers = {"num": int(wrong.sum()), "ahead": int(np.median(ahead[wrong]))}
        yield run.finding("versions_ahead", wrong, run.sampled_at, _BY_VERSION, numbers)


def _masked(run: _Run) -> Iterator[DataFinding]:
    if (found := _sampled_by(run)) is None:
        return
    sample, engine, other = found
    at = run.sampled_at
    counted = np.bincount(sample.seq[sample.mask], minlength=sample.num_sequences)
    if (empty := (counted == 0) & (sample.lengths > 0)).sum() >= 3:
        yield run.finding("rows_masked", empty, at, _BY_ROW, {"num": int(empty.sum())}, notice=True)
    place = np.arange(len(sample.tokens))
    last = np.full(sample.num_sequences, -1)
    np.maximum.at(last, sample.seq[sample.mask], place[sample.mask])
    sampled = (engine.logprobs < 0) & np.isfinite(engine.logprobs) & np.isfinite(other.logprobs)
    cut = sampled & (place > last[sample.seq]) & (last[sample.seq] >= 0) & ~_repeats_end(sample)
    rows = np.unique(sample.seq[cut])
    stopped = np.array([str(reason or "").lower() == "stop" for reason in sample.finish_reasons], bool)
    if len(rows) > max(3, (stopped.sum() if stopped.any() and stopped[rows].all() else sample.num_sequences) / 2):
        numbers: Numbers = {"num_tokens": int(cut.sum()), "num_rows": len(rows), "end": "end"}
        yield run.finding("mask_cuts", np.isin(np.arange(len(at)), rows), at, _BY_ROW, numbers, notice=True)
        return
    first = np.full(sample.num_sequences, len(place))
    np.minimum.at(first, sample.seq[sample.mask], place[sample.mask])
    cut = sampled & (place < first[sample.seq]) & (first[sample.seq] < len(place))
    rows = np.unique(sample.seq[cut])
    # A prefix that is forced, not sampled, is the same in all rows.
    is_sampled = len(np.unique(sample.tokens[sample.starts[:-1][rows]])) > max(3, len(rows) / 10)
    if len(rows) > max(3, sample.num_sequences / 2) and is_sampled:
        numbers = {"num_tokens": int(cut.sum()), "num_rows": len(rows), "end": "beginning"}
        yield run.finding("mask_cuts", np.isin(np.arange(len(at)), rows), at, _BY_ROW, numbers)


def _finished(run: _Run) -> Iterator[DataFinding]:
    sample = run.sample
    if sample is None or not sample.lengths.any():
        return
    at = run.sampled_at
    said = np.array([str(reason or "").lower() for reason in sample.finish_reasons])
    longest, limit = int(sample.lengths.max()), sample.settings["max_tokens"]
    cut = said == "length"
    early = cut & np.isfinite(limit) & (sample.lengths < limit)
    total = sample.lengths + sample.prompt_lengths
    if early.sum() >= max(3, 0.5 * cut.sum()) and np.ptp(sample.lengths[early]) == 0 and np.ptp(total[early]):
        numbers: Numbers = {
            "num": int(early.sum()), "length": int(sample.lengths[early][0]), "limit": float(np.median(limit[early])),
        }  # fmt: skip
        yield run.finding("limit_contradicts", early, at, _BY_ROW, numbers)
    if (beyond := np.isfinite(limit) & (limit > 0) & (sample.lengths > limit)).sum() >= 3:
        numbers = {"num": int(beyond.sum()), "length": longest, "limit": float(np.median(limit[beyond]))}
        yield run.finding("limit_exceeded", beyond, at, _BY_ROW, numbers)
    last = sample.tokens[np.maximum(sample.starts[1:] - 1, 0)]
    short = sample.lengths < longest
    ends, counts = np.unique(last[short], return_counts=True)
    usual = ends[np.argsort(-counts)][:3]
    if short.sum() < 8 or np.isin(last[short], usual).mean() < 0.9:  # a stop string may end with any token
        return
    has_end = np.isin(last, usual)
    wrong = ((said == "stop") & ~short & ~has_end) | (cut & short & has_end & (total < total.max()))
    if wrong.sum() >= max(3, 0.02 * np.isin(said, ("stop", "length")).sum()):
        numbers = {
            "num": int(wrong.sum()), "num_stop": int((wrong & ~cut).sum()), "num_length": int((wrong & cut).sum()),
            "length": longest,
        }  # fmt: skip
        yield run.finding("finish_contradicts", wrong, at, _BY_ROW, numbers)


def _entropies(run: _Run) -> Iterator[DataFinding]:
    """Find entropies recorded in bits or one token off. Correct entropies equal -logprob on average."""
    if (sample := run.sample) is None:
        return
    at = run.sampled_at
    compared = sample.compared
    if not compared.any() or abs(np.mean(sample.d[compared])) > -0.02 * np.mean(sample.b.logprobs[compared]):
        return  # the entropies may be those of the other side's distribution
    joined = np.diff(sample.seq) == 0
    for side in (sample.a, sample.b):
        if side.entropy is None:
            continue
        there = sample.mask & np.isfinite(side.entropy) & np.isfinite(side.logprobs)
        inside = there & np.r_[False, there[:-1] & joined] & np.r_[there[1:] & joined, False]
        if inside.sum() < 500 or np.std(side.entropy[inside]) < 0.05:
            continue
        surprise, entropy = -side.logprobs[inside], side.entropy[inside]
        parts = np.array_split(np.argsort(entropy, kind="stable"), 6)[2:]
        ratios = np.array([surprise[part].mean() / max(entropy[part].mean(), 1e-9) for part in parts])
        numbers: Numbers = {"name": side.name, "ratio": float(np.median(ratios))}
        everywhere = np.ones(len(at), bool)
        query = _ENTROPIES.replace("{name}", side.name)
        if abs(np.median(ratios) / np.log(2.0) - 1) < 0.03 and np.all(np.abs(ratios / np.log(2.0) - 1) < 0.12):
            left = np.bincount(sample.seq[inside], entropy * np.log(2.0) - surprise, len(at))
            count = np.bincount(sample.seq[inside], minlength=len(at))
            # If only some of the rows fit, the others were sampled from another distribution.
            if part_of_rows(sample, np.where(count > 0, left / np.maximum(count, 1), np.nan)) is None:
                yield run.finding("entropies_in_bits", everywhere, at, query, numbers)
        place = np.flatnonzero(inside)
        own, before, after = (np.corrcoef(surprise, side.entropy[place + lag])[0, 1] for lag in (0, -1, 1))
        lag, best = (-1, before) if before > after else (1, after)
        if best > 0.2 and best > 3 * own and (best - own) * np.sqrt(len(place)) > 8:
            yield run.finding(
                "entropies_shifted", everywhere, at, query,
                numbers | {"which": "next" if lag < 0 else "previous", "own": own, "best": best},
            )  # fmt: skip
