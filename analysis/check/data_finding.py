"""Findings about a run's data, and the rows that they are about.

Shapes: N rows (sequences) in the run or in one step, S steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..advice import Advice
from ..trace.columns import read_hyperparameters, sequence_columns
from ..trace.database import Database
from ..trace.ragged import array_of
from ..trace.tokens import tokens_by_step
from . import commands
from .sample import MAX_READ_TOKENS, Sample

_BY_ROW = "SELECT step, group_id, seq_id, hash(prompt_ids, response_ids) AS response, reward, advantage FROM {rows} ORDER BY step"
_BY_STEP = "SELECT step, avg(reward) AS reward, min(reward) AS lowest, max(reward) AS highest, avg(num_response_tokens) AS length, max(abs(advantage)) AS largest FROM {rows} GROUP BY step ORDER BY step"
_BY_GROUP = "SELECT step, group_id, count(*) AS n, count(DISTINCT prompt_ids) AS prompts, avg(reward) AS reward, avg(advantage) AS advantage, corr(reward, advantage) AS correlation FROM {rows} GROUP BY ALL ORDER BY step, group_id"
_BY_VERSION = 'SELECT step, "pass", policy_version, count(*) AS num_sequences FROM scores GROUP BY ALL ORDER BY ALL'
_EQUAL_BY_STEP = "SELECT step, count(*) AS num_tokens, sum((d = 0)::INTEGER) AS num_equal FROM pair('{a}', '{b}') GROUP BY step ORDER BY step"
_ENTROPIES = "SELECT round(e, 1) AS entropy, avg(-p) AS surprise, count(*) AS n FROM (SELECT unnest(entropy) AS e, unnest(logprobs) AS p FROM scores WHERE \"pass\" = '{name}') GROUP BY ALL ORDER BY ALL"
_TOKENS = "SELECT position, token_id, mask, rollout_logprob, train_logprob FROM tokens WHERE step = {step} AND seq_id = '{seq_id}' ORDER BY position"
_NOT_FINITE = "SELECT step, seq_id, {column} FROM {rows} WHERE NOT isfinite({column}) ORDER BY step"

KINDS = {
    "not_finite": ("NaN or infinite {column}", "{num:,} values of {column} are NaN or infinite", _NOT_FINITE),
    "rewards_constant": ("constant rewards", "every reward{after} is {value:g}, so there is nothing to learn", _BY_STEP),
    "rewards_by_prompt": ("rewards do not depend on the response", "all {num:,} groups with different responses have equal rewards, although rewards differ between prompts, so there is nothing to learn within a group. Rewards may be cached by prompt", _BY_GROUP),
    "one_row_groups": ("group ids are unique per row", "each prompt has {rows_per_prompt:.3g} rows on average, but every row has its own group", _BY_GROUP),
    "groups_mix_prompts": ("groups mix prompts", "{num_groups:,} groups contain rows from several prompts, up to {most} in one group", _BY_GROUP),
    "prompts_split": ("prompts are split over groups", "each prompt's rows are split over {num_groups} groups per step, each with its own baseline", _BY_GROUP),
    "rows_alone": ("some groups contain a single row", "{num:,} rows are alone in their group although other rows in the step have the same prompt, so their baseline is their own reward", _BY_GROUP),
    "advantages_constant": ("constant advantages", "at {num_steps} steps, advantages are equal within each group (mean {value:g}) although rewards differ", _BY_GROUP),
    "advantages_inverted": ("advantages have the wrong sign", "advantages decrease as rewards increase: their correlation within groups is {correlation:.3f}", _BY_GROUP),
    "advantages_unequal": ("equal rewards in a group get different advantages", "{num:,} rows have a different advantage from the other rows with the same reward in their group, so either rewards were changed after advantages were computed, or part of each group has its own baseline"),
    "advantages_of_equal": ("equal rewards get advantages", "in {num:,} groups all rewards are equal, yet the advantages are {size:.3g} instead of 0, which is rounding error divided by a tiny standard deviation"),
    "rows_lost": ("groups lost rows after their baseline was computed", "in {num:,} groups with fewer than {size} rows, the advantages do not sum to 0, unlike in complete groups, so rows were removed afterwards"),
    "rows_masked": ("rows without tokens in the loss", "{num:,} rows have advantages but no tokens in the loss"),
    "versions_ahead": ("the engine's policy version is ahead of the trainer's", "in {num:,} rows, the engine's policy version is {ahead:.0f} ahead of the trainer's, although the trainer does not have these weights yet, so one counter is wrong", _BY_VERSION),
    "advantages_mixed": ("some advantages follow a different rule", "in {num:,} rows, advantages have {rule}, while all other advantages follow the group's mean and scale"),
    "advantages_unrelated": ("advantages do not follow rewards", "the correlation between advantages and rewards within groups is {correlation:.3f} (up to {error:.2f} by chance)", _BY_GROUP),
    "rewards_of_other_rows": ("rewards belong to other rows", "advantages follow other rows' rewards ({explanation}: fit {fit:.4f}); as recorded, their correlation with rewards is {correlation:.3f} within groups", _BY_GROUP),
    "baseline": ("the baseline is not the group's mean", "advantages are rewards minus {explanation} (fit {fit:.4f}; with the group's mean {own:.4f})", _BY_GROUP),
    "baseline_unknown": ("advantages do not average 0 within groups", "the groups' mean advantages have a standard deviation of {between:.2f} times the rms advantage, and no known baseline fits", _BY_GROUP),
    "advantages_clipped": ("advantages are clipped", "advantages are clipped to {low:.3g} and {high:.3g} (fit {fit:.4f})", _BY_GROUP),
    "advantages_by_length": ("advantages are scaled by the response length", "advantages are rewards minus the group's mean, {explanation} (fit {fit:.4f}; without the length {own:.4f})", _BY_GROUP),
    "advantages_misplaced": ("advantages do not cover the whole response", "in {num:,} rows all tokens have the same advantage, except the {end} ones ({zeros:.3g} on average), which have 0"),
    "advantages_vary": ("advantages vary within responses", "in {num:,} rows advantages vary within the response, although {setting} implies one advantage per response"),
    "advantages_scaled": ("advantages have an unusual scale", "advantages are {factor:.3g} times the rewards minus the group's mean, which no usual normalisation explains", _BY_GROUP),
    "advantages_extreme": ("extreme advantages", "|advantage| reaches {largest:.4g} ({usual:.3g} is usual), and no baseline or normalisation gives more than {bound:.3g}", _BY_STEP),
    "rewards_unequal": ("identical responses get different rewards", "{num:,} of {num_pairs:,} pairs of identical responses to the same prompt have different rewards; {explanation}"),
    "batch_repeats": ("batches repeat", "at {num_steps:,} steps, at least 90% of the prompts and responses are the same as at the previous step"),
    "advantages_unlike_settings": ("advantages contradict the recorded settings", "{setting} is recorded, but advantages are rewards minus the group's mean, {rule} by the group's standard deviation", _BY_GROUP),
    "metric_contradicts": ("a logged metric contradicts the rows", "{name} is logged as {logged:.4g} at step {step}, but the rows give {recorded:.4g}", _BY_STEP),
    "metric_of_others": ("a logged metric averages other values", "{name} is logged as {logged:.4g} at step {step}, the mean of {of}, but all rows give {recorded:.4g}", _BY_STEP),
    "ratio_is_one": ("the importance ratio is 1 by construction", "{a} and {b} are bitwise equal at all {num_tokens:,} tokens inspected; {reason}", _EQUAL_BY_STEP),
    "padding_counts": ("padding after the end token counts toward the loss", "{num_tokens:,} tokens in {num_rows:,} rows repeat the end token and count toward the loss, although they were not sampled", _TOKENS),
    "samples_repeat": ("responses repeat", "{num:,} of {num_asked:,} responses to a known prompt occurred before, but judging by their logprobs, at most {expected:.0f} should repeat, so several rows share a seed or rows were reused"),
    "finish_contradicts": ("finish reasons contradict the tokens", "{num:,} rows have the wrong finish reason: {num_stop:,} have the full length {length} and no end token but say 'stop', and {num_length:,} are shorter and end with an end token but say 'length'"),
    "limit_exceeded": ("responses are longer than the recorded limit", "{num:,} rows have up to {length:,.0f} tokens although max_tokens is {limit:,.0f}, so the engine runs with a different limit"),
    "tokens_after_end": ("tokens after the end token count toward the loss", "{num:,} of {of:,} rows have token {token} exactly {distance} tokens before their end and hardly anywhere else, so it ends the response, and all tokens after it, whether sampled or padding, count toward the loss"),
    "prompt_padding": ("prompts are recorded with padding", "{num:,} of {of:,} prompts begin with token {token} repeated, and no other prompt begins with a repeated token, so padding is recorded as part of the prompt"),
    "rewards_differ": ("the reward is not the sum of its parts", "the reward is a weighted sum of the reward functions only with {explanation}"),
    "rewards_weighted": ("reward functions are not simply added", "the reward is {explanation}, {contrast}", _BY_STEP),
    "metric_late": ("a logged metric belongs to another step", "at all {num:,} logged steps, {name} is logged one step {late} the rows that it averages, so values are assigned to the wrong step", _BY_STEP),
    "reference_is_policy": ("the reference is the policy", "reference and train are bitwise equal at all {num_tokens:,} tokens inspected, in {num_steps:,} steps, so the KL is 0 by construction: either the reference shares the policy's weights, or no update has changed them", _EQUAL_BY_STEP),
    "limit_contradicts": ("responses are cut before the recorded limit", "{num:,} rows have finish reason 'length' at {length:,.0f} tokens, but max_tokens is {limit:,.0f}"),
    "entropies_in_bits": ("entropies are in bits", "at all entropy levels, the mean of -logprob is {ratio:.3f} (ln 2) times the entropy recorded for {name}, so the entropies are in bits, not nats", _ENTROPIES),
    "entropies_shifted": ("entropies belong to other positions", "-logprob correlates better with {name}'s entropy one position away ({best:.2f}) than with its own ({own:.2f}), so each entropy belongs to the {which} position", _ENTROPIES),
    "mask_cuts": ("the loss mask leaves out sampled tokens", "{num_tokens:,} sampled tokens at the {end} of {num_rows:,} rows do not count toward the loss"),
    "unsampled_count": ("tokens that were not sampled count toward the loss", "{num_tokens:,} consecutive tokens in {num_rows:,} rows, such as tool output, count toward the loss but were not sampled", _TOKENS),}  # fmt: skip
"""Code -> title, sentence template, and the query that shows the finding (default: by row), filled with its numbers."""

ALGORITHM = "adv|baseline|estimator|algorithm|loss_type"
CHANCE = np.log(1e-6)
"""Log probability below which chance does not explain a pattern."""
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


_LOST = "coalesce(NOT isfinite({}), false)"
_ZEROS = "coalesce(list_position(list_transform({}, lambda value: value <> 0), true) - 1, 0)"
_ROWS = f"""
SELECT step, coalesce("group", 0) AS "group", coalesce(prompt, 0) AS prompt, coalesce(response, 0) AS response, reward, length, prompt_length, coalesce(advantage, list_avg(list)) AS advantage,
       coalesce(abs(advantage), greatest(abs(list_max(list)), abs(list_min(list)))) AS largest,
       coalesce(list_max(list) - list_min(list) > 1e-5 * largest, false) AS is_per_token,
       CASE WHEN list_unique(list) = 2 THEN len(list_filter(list, lambda value: value = 0)) ELSE 0 END AS num_zero,
       {_ZEROS.format("list")} AS zeros_first, {_ZEROS.format("list_reverse(list)")} AS zeros_last,
       {_LOST.format("reward")} AS lost_reward, {_LOST.format("coalesce(advantage, list_sum(list))")} AS lost_advantage
FROM (
    SELECT step, row_number() OVER () AS place, num_response_tokens::DOUBLE AS length, coalesce(len(prompt_ids), 0)::DOUBLE AS prompt_length, reward, advantage,
           CASE WHEN group_id IS NOT NULL THEN hash(group_id) END AS "group", CASE WHEN prompt_ids IS NOT NULL THEN hash(prompt_ids) END AS prompt,
           CASE WHEN {{asked}} THEN hash(prompt_ids, response_ids) END AS response, {{list}} AS list
    FROM sequences
)
ORDER BY step, place
"""
"""One row per sequence. Missing hashes are 0, also that of a response that is not inspected. `largest` and `is_per_token` only consider tokens in the loss."""
_COUNTED = "list_filter(advantages, lambda value, place: coalesce(response_mask[place], true))"


class DataRows:
    """The run's rows, and the sample of rows whose tokens are inspected."""

    def __init__(self, database: Database, sample: Sample | None) -> None:
        columns, self.inspected = sequence_columns(database), "step"
        tokens = (_COUNTED if columns.mask else "advantages") if columns.advantages else "NULL"
        if sample is not None:
            self.inspected = ", ".join(str(step) for step in np.unique(sample.steps))
        is_large = sum(tokens_by_step(database).values()) > MAX_READ_TOKENS
        asked = f"step IN ({self.inspected})" if is_large else "true"
        with database.following("reading rewards and advantages"):
            table = database.connection.sql(_ROWS.format(list=f"{tokens}::DOUBLE[]", asked=asked)).to_arrow_table()
        self.database, self.sample, self.settings = database, sample, read_hyperparameters(database)
        self.rows = {name: array_of(table[name]) for name in table.column_names}
        self.steps, self.at = np.unique(self.rows["step"], return_inverse=True)
        self.labels = self.rows["group" if self.rows["group"].any() else "prompt"]
        self.is_per_token = bool(self.rows["is_per_token"].any())

    def find(
        self, code: str, affected: np.ndarray, steps: np.ndarray | None = None, *, least: int = 1, notice: bool = False,
        notice_if_whole: bool = False, **numbers: Any,
    ) -> Iterator[DataFinding]:  # fmt: skip
        """Yield a finding if at least `least` of the tested rows or steps are affected ([N] bool).

        `steps` holds the step of each, by default of the run's rows. Numbers that are arrays are reduced to the affected
        rows' median. A finding with `notice_if_whole` is a fault if it begins during the run.
        """
        if affected.sum() < least:
            return
        since = self._since(affected, self.rows["step"] if steps is None else steps)
        condition = self.database.step_condition()
        filled: Numbers = {"num": int(affected.sum())} if "{num:" in KINDS[code][1] else {}
        for name, value in numbers.items():
            filled[name] = float(np.median(value[affected])) if isinstance(value, np.ndarray) else value
        query = (*KINDS[code], _BY_ROW)[2].format(
            rows=f"(FROM sequences WHERE {condition})" if condition else "sequences", **filled
        )
        yield DataFinding(
            code=code, share=float(np.mean(affected)), since=since, is_notice=notice or (notice_if_whole and since is None),
            numbers=filled, next=commands.sql_of(self.database.given[0], query),
        )  # fmt: skip

    def _since(self, affected: np.ndarray, steps: np.ndarray) -> int | None:
        """Return the step at which a fault begins, or None if that is the first step tested."""
        judged, index = np.unique(steps, return_inverse=True)
        is_bad = np.bincount(index, affected) > 0
        first = int(np.cumsum(np.where(is_bad, 1, -1)[::-1])[::-1].argmax())
        if 2 * is_bad[first:].sum() <= is_bad.sum():
            first = int(is_bad.argmax())
        return int(judged[first]) if first else None

    def setting(self, name: str, value: str) -> str:
        """Return the first setting whose name and value match, formatted as `name = value`, or an empty string."""
        for key, given in self.settings.items():
            if re.search(name, key, re.IGNORECASE) and re.search(value, str(given), re.IGNORECASE):
                return f"{key} = {given}"
        return ""

    @cached_property
    def group_setting(self) -> str:
        """Setting according to which the group's mean is the baseline. Empty if there is none."""
        return self.setting(ALGORITHM, "grpo|rloo|group")
