"""Read a run's rows, and find the rule that turns rewards into advantages.

Shapes: N rows with a finite reward and a finite advantage, ordered by step; S steps; G groups, each within one step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..trace.columns import read_hyperparameters, scored_passes, sequence_columns, writer_states
from ..trace.database import Database
from ..trace.ragged import array_of
from ..trace.tokens import tokens_by_step
from . import commands
from .finding import BY_GROUP, DataFault, DataFinding, Finding, data_fault
from .sample import MAX_READ_TOKENS, Sample, in_lower_case
from .where import rank_of, row_columns, shared_by

_DIVIDED, _PLUS = "deviation", "deviation_plus"
_LEVELS = ("maximum", "minimum", "median")
_RULES = {
    "batch_constant": "a constant for the whole batch", "nothing": "nothing", "batch_mean": "the batch's mean",
    "token_mean": "the mean over the batch's tokens", "padded_mean": "the mean over the batch's tokens and padding",
    "group_and_padded_mean": "the group's mean and then the mean over the batch's tokens and padding", "maximum": "the group's maximum",
    "minimum": "the group's minimum", "median": "the group's median", "first_row": "the reward of the group's first row",
    "first_rows": "the mean of the group's first {last} rows", "half": "the mean over the half of the group that contains the row",
    "mean_times": "{last} times the group's mean",
    "mean_of_turns": "the mean over all turns of the group, so that a trajectory counts once for each of its turns",
    "mean_of_own_turns": "the mean over all turns of the group, in which earlier turns count with their own reward",
    "mean_of_every_row": "the mean of every {last}th row, as if rows or group ids had been reordered",
    "mean_of_neighbours": "the mean of {last} neighbouring rows, whatever their group, as if rows or group ids had been reordered",
    "mean_of_some_groups": "the mean of {last} rows from several groups", "previous_group_mean": "the previous group's mean",
    "next_group_mean": "the next group's mean", "previous_step_mean": "the previous step's group's mean", "divided_by_length": "divided by the response length",
    "times_length": "multiplied by the response length", "rewards_in_group": "rewards of the same group in another order",
    "rewards_moved": "rewards moved by {last} rows", "rewards_sample_major": "rewards in sample-major order",
    "rewards_prompt_major": "rewards in prompt-major order", "rewards_of_next": "the rewards of the next step",
    "rewards_of_previous": "the rewards of the previous step", "advantages_in_step": "advantages of the same step in another order",
    "deviation": "divided by the group's standard deviation", "mean": "divided by the group's mean reward",
    "deviation_plus": "divided by the group's standard deviation plus {last}", "variance": "divided by the variance of the group's rewards",
    "root_mean_square": "divided by the root mean square of the group's rewards",
    "root_of_deviation": "divided by the square root of the standard deviation of the group's rewards",
    "times_deviation": "multiplied by the standard deviation of the group's rewards",
    "previous_group_deviation": "divided by the previous group's standard deviation", "next_group_deviation": "divided by the next group's standard deviation",
    "previous_step_deviation": "divided by the previous step's group's standard deviation",
    "deviation_of_part": "divided by the standard deviation of each 1/{last} of the batch's rows",
}  # fmt: skip
"""Rule for a baseline, an order or a scale -> phrase. A rule's name may end in a number, which replaces `{last}`. Rules that
begin with `advantages_` move advantages as those that begin with `rewards_` move rewards."""
_ERRORS = 4.0
"""Number of standard errors that chance rarely exceeds, even in a thousand steps."""
TINY = 1e-6
"""Relative size of rounding errors in float32 rewards and advantages."""
_EPS = (0.0, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1)
"""Common values of the eps added to a standard deviation before dividing by it."""
CLOSE = 0.02
"""Maximum relative difference between factors that count as equal."""
_ROUNDED, _ROUNDED_16_BIT = 2.0**-11, 2.0**-7
"""Largest rounding error relative to a group's largest advantage, in float32 and in 16 bits."""
_TOKEN_NATS = 0.65
"""Maximum |ln(s_tokens / s_rows)|, where s is the rewards' standard deviation over a batch's tokens or over its rows."""
_INEXACT = 2.0**-15
"""Maximum 1 - fit (a correlation) of a rule that reproduces the advantages up to rounding: four bfloat16 errors of 2^-9
add up to at most 2^-7, and a relative error e lowers the fit by e^2 / 2."""
_Mixed = tuple[DataFault, np.ndarray, dict[str, Any]]
"""The fault, affected rows ([N] bool), and the signal and numbers of the finding."""
_NUMBER = r"-?\d+\.?\d*(?:e-?\d+)?"
KL_IN_REWARD = r"(^|[./])(use_)?kl_in_reward$"
ALGORITHM = "adv|baseline|estimator|algorithm|loss_type"
_LOST = "coalesce(NOT isfinite({}), false)"
_ZEROS = "coalesce(list_position(list_transform({}, lambda value: value <> 0), true) - 1, 0)"
_ROWS = f"""
SELECT step, coalesce("group", 0) AS "group", coalesce(prompt, 0) AS prompt, coalesce(response, 0) AS response, coalesce(answer, 0) AS answer, last_id, finish_reason, version, reward, length, loss_length, prompt_length, coalesce(advantage, list_avg(list), list_avg(every)) AS advantage,
       coalesce(abs(advantage), greatest(abs(list_max(list)), abs(list_min(list)))) AS largest,
       coalesce(list_max(list) - list_min(list) > 1e-5 * largest, false) AS is_per_token,
       CASE WHEN list_unique(list) = 2 THEN len(list_filter(list, lambda value: value = 0)) ELSE 0 END AS num_zero,
       coalesce(len(list_filter(list, lambda value: value = 0)), 0) AS loss_zeros, coalesce(list[-1], advantage) AS outcome, coalesce(masked, 0) AS masked,
       {_ZEROS.format("list")} AS zeros_first, {_ZEROS.format("list_reverse(list)")} AS zeros_last,
       {_LOST.format("reward")} AS lost_reward, {_LOST.format("coalesce(advantage, list_sum(list))")} AS lost_advantage
FROM (
    SELECT step, row_number() OVER () AS place, finish_reason, policy_version AS version, CASE WHEN {{asked}} THEN response_ids[-1] END AS last_id, num_response_tokens::DOUBLE AS length, coalesce({{num_loss}}, num_response_tokens)::DOUBLE AS loss_length, coalesce(len(prompt_ids), 0)::DOUBLE AS prompt_length, reward, advantage,
           CASE WHEN group_id IS NOT NULL THEN hash(group_id) END AS "group", CASE WHEN prompt_ids IS NOT NULL THEN hash(prompt_ids) END AS prompt,
           CASE WHEN {{asked}} THEN hash(prompt_ids, response_ids) END AS response, CASE WHEN {{asked}} THEN hash({{own}}) END AS answer,
           {{list}} AS list, {{every}} AS every, {{masked}} AS masked
    FROM sequences
)
ORDER BY step, place
"""
"""One row per sequence. Hashes are 0 if the value is missing or was not inspected; `answer` is a hash of the response
without its prompt. `largest`, `is_per_token` and `answer` cover only loss tokens, and so does `advantage` in rows that
have any. `outcome` is the last loss token's advantage. `masked` counts masked tokens with a nonzero advantage, but only
in rows whose nonzero advantages are all equal and adjoin a 0 in the loss."""
_OWN = "list_filter(response_ids, lambda token, place: coalesce(response_mask[place], true))"
_MASKED = """
CASE WHEN len(list_distinct(list_filter(advantages, lambda value: value <> 0))) = 1
      AND len(list_filter(list_zip(advantages, response_mask, advantages[2:], response_mask[2:]), lambda pair: pair[2] AND pair[4] AND (pair[1] = 0) <> (pair[3] = 0))) > 0
     THEN len(list_filter(advantages, lambda value, place: value <> 0 AND NOT coalesce(response_mask[place], true))) ELSE 0 END
"""
_COUNTED = "list_filter(advantages, lambda value, place: coalesce(response_mask[place], true))"
_KL = """
SELECT step, place, coalesce(list_sum(d), 'nan'), coalesce(list_avg(d), 'nan'), coalesce(list_sum(list_transform(d, lambda x: x * x / 2)), 'nan'), coalesce(list_sum(list_transform(d, lambda x: exp(-x) + x - 1)), 'nan')
FROM (SELECT run, step, seq_id, response_mask AS mask, row_number() OVER () AS place FROM sequences) LEFT JOIN (
    SELECT run, step, seq_id, list_transform(list_zip(a.logprobs, b.logprobs), lambda pair: pair[1]::DOUBLE - pair[2]) AS every
    FROM scores AS a JOIN scores AS b USING (run, step, seq_id, iteration) WHERE a."pass" = 'train' AND b."pass" = 'reference' AND iteration = 0 AND {asked}
) USING (run, step, seq_id), LATERAL (SELECT list_filter(every, lambda x, position: coalesce(mask[position], true)) AS d) ORDER BY step, place
"""
_KL_FORMS = {"sum": "the sum of train - reference", "mean": "the mean of train - reference", "squares": "half the sum of its squares", "k3": "the sum of its k3 estimates"}  # fmt: skip
# Comparing all pairs of rows would be slow, so compare hashes of prompt prefixes with another row's length.
_CONTINUED = """
WITH texts AS (SELECT run, step, group_id, prompt_ids AS prompt, response_ids AS response, len(prompt) + len(response) AS length FROM sequences WHERE step IN ({steps})),
lengths AS (SELECT DISTINCT run, step, group_id, length AS part FROM texts)
SELECT DISTINCT step, hash(a.prompt, a.response), hash(b.prompt, b.response) FROM texts AS b JOIN lengths USING (run, step, group_id)
JOIN texts AS a ON (a.run, a.step, a.group_id, a.length, hash(a.prompt || a.response)) = (b.run, b.step, b.group_id, part, hash(b.prompt[:part]))
WHERE part <= len(b.prompt)
"""


class DataRows:
    """The run's rows, and the sample of rows whose tokens are inspected."""

    def __init__(self, database: Database, sample: Sample | None) -> None:
        columns, self.inspected = sequence_columns(database), "step"
        tokens = (_COUNTED if columns.mask else "advantages") if columns.advantages else "NULL"
        if sample is not None:
            self.inspected = ", ".join(str(step) for step in np.unique(sample.steps))
        is_large = sum(tokens_by_step(database).values()) > MAX_READ_TOKENS
        self.asked = f"step IN ({self.inspected})" if is_large else "true"
        parts = {"list": f"{tokens}::DOUBLE[]", "asked": self.asked, "own": _OWN if columns.mask else "response_ids"}
        parts["every"] = "advantages::DOUBLE[]" if columns.advantages else "NULL::DOUBLE[]"
        parts["masked"] = _MASKED if columns.mask and columns.advantages else "NULL"
        parts["num_loss"] = "list_sum(response_mask::INTEGER[])" if columns.mask else "NULL"
        with database.following("reading rewards and advantages"):
            table = database.connection.sql(_ROWS.format(**parts)).to_arrow_table()
        self.database, self.sample, self.settings = database, sample, read_hyperparameters(database)
        self.finish_reasons = np.array(table["finish_reason"].to_pylist(), object)
        self.rows = {name: array_of(table[name]) for name in table.column_names if name != "finish_reason"}
        self.steps, self.at = np.unique(self.rows["step"], return_inverse=True)
        self.labels = self.rows["group" if self.rows["group"].any() else "prompt"]
        self.is_per_token = bool(self.rows["is_per_token"].any())

    def find(
        self, fault: DataFault, affected: np.ndarray, steps: np.ndarray | None = None, *, signal: str = "", rows: np.ndarray | None = None,
        sample: Sample | None = None, least: int = 1, notice: bool = False, notice_if_whole: bool = False, finding: Finding | None = None, **numbers: Any,
    ) -> Iterator[DataFinding]:  # fmt: skip
        """Yield a finding if at least `least` of the tested rows or steps are `affected` ([N] bool).

        `affected` has one element per row of the run, of `sample` or of the selection `rows`, and the finding reports
        what the affected rows have in common. If `steps` is given, it contains the step of each element instead. Arrays
        in `numbers` are replaced by their median over the affected elements. With `notice_if_whole`, a finding that
        holds from the first step is a notice, not a fault.
        """
        if affected.sum() < least:
            return
        signal = signal or fault.code
        columns: dict[str, np.ndarray] = {}
        if steps is None:
            columns = self.columns if sample is None else row_columns(sample)
            columns = columns if rows is None else {name: each[rows] for name, each in columns.items()}
        since = self._since(affected, columns["step"] if steps is None else steps)
        condition = self.database.step_condition()
        known: dict[str, Any] = {"num": int(affected.sum())} if "{num:" in fault.evidence[signal] else {}
        for name, value in numbers.items():
            known[name] = float(np.median(value[affected])) if isinstance(value, np.ndarray) else value
        rows_text = f"(FROM sequences WHERE {condition})" if condition else "sequences"
        query = fault.query.format(rows=rows_text, **known)
        title = fault.filled(fault.title, signal, known | {"finding": finding})
        yield DataFinding(
            code=fault.code, signal=signal, title=title, share=float(np.mean(affected)), since=since,
            is_notice=bool(notice or (notice_if_whole and since is None)), numbers=known, finding=finding and replace(finding, tokens=None),
            where=shared_by(columns, affected) if columns else {}, next=commands.sql_of(self.database.given[0], query),
        )  # fmt: skip

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        rank = np.where(self.labels > 0, rank_of(self.cell), np.nan)
        more = {"group_rank": rank, "response_length": self.rows["length"], "finish_reason": self.finish_reasons}
        return self.rows | more

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
        pairs = ((key, given) for key, given in self.settings.items() if re.search(name, key, re.IGNORECASE))
        return next((f"{key} = {given}" for key, given in pairs if re.search(value, str(given), re.IGNORECASE)), "")

    def switched_on(self, name: str) -> str:
        """Return the first setting whose name matches and whose value is true, as `name = true`, or an empty string."""
        return re.sub(r"= \S+$", "= true", self.setting(name, r"^(true|1(\.0)?)$"))

    def numbers(self, name: str) -> dict[str, float]:
        """Return the settings whose name matches and whose value is a number of at least 0."""
        given = {key: str(value) for key, value in self.settings.items() if re.search(name, key, re.IGNORECASE)}
        return {key: float(value) for key, value in given.items() if re.fullmatch(r"\d+(\.\d*)?(e-?\d+)?", value)}

    def number(self, name: str) -> float | None:
        """Return the first of `numbers`, or None if there are none."""
        return next(iter(self.numbers(name).values()), None)

    @cached_property
    def ended(self) -> np.ndarray:
        """Each row's finish reason in lower case, [N] str, empty if unknown."""
        return in_lower_case(self.finish_reasons)

    @cached_property
    def cell(self) -> np.ndarray:
        """Number of each row's group within its step, [N]."""
        return numbered(self.labels, self.at)

    @cached_property
    def reward(self) -> np.ndarray:
        """Each row's reward, [N], NaN if it is not finite."""
        return np.where(np.isfinite(self.rows["reward"]), self.rows["reward"], np.nan)

    @cached_property
    def trainer_versions(self) -> np.ndarray:
        """Policy version with which the trainer scored each step's rows, [S], NaN if unknown."""
        query = """SELECT step, max(policy_version) FROM scores WHERE "pass" = 'train' GROUP BY step"""
        known = dict(self.database.connection.execute(query).fetchall())
        return np.array([known.get(step) for step in self.steps.tolist()], float)

    @cached_property
    def lag(self) -> np.ndarray:
        """Number of updates by which each row's policy version is behind the trainer's, [N], NaN if unknown."""
        return np.asarray(self.trainer_versions[self.at] - self.rows["version"])

    @cached_property
    def left_out(self) -> np.ndarray:
        return _left_out(self.reward, self.cell)

    @cached_property
    def trains(self) -> np.ndarray:
        """True for rows with tokens in the loss, except truncated rows if these all have an advantage of 0, [N] bool."""
        in_loss = self.rows["loss_length"] > 0
        cut = in_loss & (self.ended == "length")
        are_zeroed = cut.sum() >= 8 and (self.rows["advantage"][cut] == 0).all()
        return np.asarray(in_loss & ~(cut & are_zeroed))

    @cached_property
    def counts_masked(self) -> bool | None:
        """Whether rewards of rows that do not train count toward their group's mean. None if unclear."""
        cell, advantage, reward = self.cell, np.nan_to_num(self.rows["advantage"]), self.reward
        trains = 1.0 * self.trains
        share = np.maximum(mean_of(cell, trains), TINY)
        apart = mean_of(cell, reward * trains) / share - mean_of(cell, reward)
        asked = (trains > 0) & (share < 1) & (self.labels > 0) & (np.abs(apart) > 0.01)
        least = CLOSE * rms_of(self.at, advantage)
        means = (mean_of(cell, advantage), mean_of(cell, advantage * trains) / share)
        with_masked, without = (asked.sum() >= 8 and (np.abs(mean) < least)[asked].mean() > 0.95 for mean in means)
        if without:
            return False
        # If the advantages of the other rows were set to 0, those that remain do not average 0.
        with_masked |= asked.sum() >= 8 and (np.sign(means[1]) == np.sign(apart))[asked].mean() > 0.95
        return True if with_masked else None

    @cached_property
    def continued(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of rows of a group, as two arrays of row indices, [K]: the second row's prompt continues the first row.
        Of identical rows, the second array has the first, and the first array all."""
        rows, cell = self.rows, self.cell
        is_possible = rows["group"].any() and (mean_of(cell, rows["prompt_length"]) != rows["prompt_length"]).any()
        query = _CONTINUED.format(steps=self.inspected if is_possible else "NULL")
        step, earlier, continuing = map(np.asarray, self.database.connection.execute(query).fetchnumpy().values())
        texts = rows["response"] ^ _of_step(rows["step"])
        one, two = earlier ^ _of_step(step), continuing ^ _of_step(step)
        order = np.argsort(texts, kind="stable")
        first, last = (np.searchsorted(texts, one, side, order) for side in ("left", "right"))
        num = last - first
        row = np.repeat(first, num) + np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
        return order[row], np.repeat(order[np.searchsorted(texts, two, sorter=order)], num)

    @cached_property
    def kl(self) -> dict[str, np.ndarray]:
        """Each row's KL penalty to the reference in its usual forms, [N], NaN if unknown. Empty without a reference."""
        if not {"train", "reference"} <= {*scored_passes(self.database)}:
            return {}
        columns = [*self.database.connection.sql(_KL.format(asked=self.asked)).fetchnumpy().values()][2:]
        return dict(zip(_KL_FORMS, map(np.asarray, columns), strict=True))

    @cached_property
    def parts(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Names of the reward functions, their values ([N, P], NaN if missing), and the rows that have them ([N] bool).
        Empty if rows have different reward functions."""
        execute, given = self.database.connection.execute, f"{self.asked} AND cardinality(rewards) > 0"
        kinds = execute(f"SELECT DISTINCT map_keys(rewards) FROM sequences WHERE {given}").fetchall()
        names: list[str] = kinds[0][0] if len(kinds) == 1 else []
        if not names:
            return [], np.zeros((len(self.at), 0)), np.zeros(len(self.at), bool)
        columns = ", ".join(f"map_values(rewards)[{at}]::DOUBLE AS part_{at}" for at in range(1, len(names) + 1))
        query = f"SELECT step, row_number() OVER () AS place, coalesce({given}, false) AS is_given, {columns} FROM sequences ORDER BY step, place"
        table = self.database.connection.sql(query).to_arrow_table()
        is_given, *values = (array_of(table[name]) for name in table.column_names[2:])
        return names, np.where(is_given[:, None], np.stack(values, axis=1), np.nan), is_given

    @cached_property
    def weights(self) -> dict[str, float]:
        """Recorded weights of reward functions, by name."""
        names, given = self.parts[0], str(self.settings.get("reward_weights", ""))
        listed, declared = re.findall(_NUMBER, given), dict(re.findall(rf"([\w./-]+)[^\w-]+({_NUMBER})", given))
        if given.startswith("[") and len(listed) == len(names):  # TRL lists weights in the functions' order
            declared = dict(zip(names, listed, strict=True))
        return {name: float(number) for name, number in declared.items()}

    @cached_property
    def end_ids(self) -> list[int]:
        """End token ids of the recorded tokenizer and model config. Empty if unknown."""
        states = writer_states(self.database)
        given = [each for one in states for each in (one.tokenizer, one.model.get("config")) if isinstance(each, dict)]
        ids = [each.get("eos_token_id") for each in given]
        flat = chain.from_iterable(each if isinstance(each, list) else [each] for each in ids)
        return sorted({id for id in flat if isinstance(id, int)})

    @cached_property
    def group_setting(self) -> str:
        """First recorded setting that implies a group-mean baseline, or an empty string."""
        return self.setting(ALGORITHM, "grpo|rloo|group")


def _of_step(step: np.ndarray) -> np.ndarray:
    """Return bits that distinguish the hash of a text at one step from that at another, [N]."""
    return step.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def mean_of(label: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.asarray((np.bincount(label, values) / np.maximum(np.bincount(label), 1))[label])


def rms_of(label: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(mean_of(label, values * values)))


def count_of(label: np.ndarray) -> np.ndarray:
    return np.asarray(np.bincount(label)[label])


def _left_out(r: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Normalise each reward by the mean and deviation of its group's other rewards, [N]. NaN if those are equal."""
    n, x = count_of(g), r - mean_of(g, r)
    others = np.maximum(n - 1, 1)
    deviation = np.sqrt(np.maximum(n * mean_of(g, x * x) - x * x * n / others, 0.0) / others)
    is_known = deviation > TINY * mean_of(g, np.abs(r))
    return np.asarray(np.divide(x * n / others, np.where(is_known, deviation, np.nan)))


def is_16_bit(values: np.ndarray) -> bool:
    """Return whether all values are 16-bit floats."""
    return not np.any(np.clip(values, -3e38, 3e38).astype(np.float32).view(np.uint32) & 0xFFF)


class ExactFits(NamedTuple):
    """Least-squares fits of each cell's values to several columns and a constant."""

    slopes: np.ndarray
    """[G, K]: the columns' coefficients. NaN without an exact fit, and for columns that are constant in the cell."""
    fits: np.ndarray
    """[G] bool: values vary, and the fit reproduces them up to rounding although there are more values than coefficients."""
    hold: bool
    """True if at least eight cells can contradict the fit, and it reproduces nearly all of them."""


def exact_fits(values: np.ndarray, columns: np.ndarray, cell: np.ndarray) -> ExactFits:
    """Fit `values` [N] to `columns` [N, K] in each `cell` [N], numbered from 0."""
    num, at, first = columns.shape[1], np.arange(columns.shape[1]), np.unique(cell, return_index=True)[1]
    unit = np.abs(columns).max(axis=0)
    columns = columns / np.where(unit > 0, unit, 1.0)  # squares of large values would overflow
    y, x = values - mean_of(cell, values), np.stack([each - mean_of(cell, each) for each in columns.T], axis=1)
    spread = np.stack([rms_of(cell, each) for each in x.T], axis=1)
    varies = (spread > TINY * (unit > 0))[first]
    x = np.divide(x, spread, out=np.zeros_like(x), where=varies[cell])
    gram = np.stack([mean_of(cell, x[:, i] * x[:, j])[first] for i in at for j in at], axis=1).reshape(-1, num, num)
    gram[:, at, at] += ~varies
    is_full = np.linalg.eigvalsh(gram)[:, 0] > 1e-6
    gram[~is_full] = np.eye(num)
    moments = np.stack([mean_of(cell, each * y)[first] for each in x.T], axis=1)
    scaled = np.linalg.solve(gram, moments[..., None])[..., 0]
    size, error = np.zeros((2, len(first)))
    np.maximum.at(size, cell, np.abs(values))
    np.maximum.at(error, cell, np.abs(y - np.sum(scaled[cell] * x, axis=1)))
    points = np.bincount(np.unique(np.c_[cell, np.round(x, 6)], axis=0)[:, 0].astype(int))
    asked = is_full & (rms_of(cell, y)[first] > TINY * size) & (points >= varies.sum(axis=1) + 2)
    fits = asked & (error <= size * (_ROUNDED_16_BIT if is_16_bit(values) else _ROUNDED))
    slopes = np.divide(scaled, spread[first] * unit, out=np.full(scaled.shape, np.nan), where=varies & fits[:, None])
    return ExactFits(slopes, fits, bool(asked.sum() >= 8 and fits.sum() > 0.95 * asked.sum()))


def is_constant(values: np.ndarray) -> bool:
    """Return whether nearly all known `values` are equal, up to a small relative difference."""
    known = values[np.isfinite(values)]
    return not len(known) or bool(np.mean(np.abs(known / np.median(known) - 1) < CLOSE) > 0.95)


def split_steps(at: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Split `values` [N] by step. `at` [N] contains their step indices in ascending order."""
    return np.split(values, np.flatnonzero(np.diff(at)) + 1)


def numbered(label: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Number the distinct (label, step) pairs in order of first occurrence. Return each row's number, [N]."""
    key = np.unique(label, return_inverse=True)[1] * (int(at.max(initial=0)) + 1) + at
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[index])


def shifted(at: np.ndarray, in_group: int = 1) -> dict[str, np.ndarray]:
    """Return, by rule, the row in which each row's reward would be recorded, [N], or -1."""
    first, place, size = np.searchsorted(at, at), np.arange(len(at)), count_of(at)
    tried = sorted(range(-8, 9), key=abs)[1:]
    moves = {f"rewards_moved_{by}": first + (place - first + by) % size for by in tried}
    for name, by in (("sample", np.maximum(size // in_group, 1)), ("prompt", in_group)) if in_group > 1 else ():
        row = (place - first) % by * (size // by) + (place - first) // by
        moves[f"rewards_{name}_major"] = np.where(size % in_group == 0, first + row, -1)
    for name, by in (("next", 1), ("previous", -1)):
        other, end = np.searchsorted(at, at + by), np.searchsorted(at, at + by, "right")
        moves[f"rewards_of_{name}"] = np.where(end - other == size, other + place - first, -1)
    return moves


def rule_words(numbers: Mapping[str, Any]) -> dict[str, str]:
    rule = str(numbers.get("rule", "nothing"))
    moved = rule.replace("advantages_", "rewards_")
    name, _, last = moved.rpartition("_")
    phrase = _RULES.get(rule) or _RULES.get(moved) or _RULES[name].format(last=last)
    return {"rule": phrase if moved == rule or rule in _RULES else phrase.replace("rewards", "advantages")}


@dataclass(frozen=True)
class _Rows:
    """Rewards `r`, advantages `a`, group numbers `g`, step indices `at` (ascending), and response lengths, [N] each."""

    r: np.ndarray
    a: np.ndarray
    g: np.ndarray
    at: np.ndarray
    length: np.ndarray
    baselines: tuple[tuple[str, np.ndarray], ...] = ()
    """Further baselines to try, from rows that are left out here: name and value for each row, [N]."""

    @cached_property
    def n(self) -> np.ndarray:
        """Number of rows in each row's group, [N]."""
        return count_of(self.g)

    @cached_property
    def x(self) -> np.ndarray:
        """Reward minus the mean reward of the row's group, [N]."""
        return np.asarray(self.r - mean_of(self.g, self.r))

    @cached_property
    def spread(self) -> np.ndarray:
        """Standard deviation of the rewards in each row's group, [N]. NaN if it is only rounding error."""
        spread = rms_of(self.g, self.x)
        return np.where(spread > TINY * self.of_step(np.maximum, np.abs(self.r)), spread, np.nan)

    @cached_property
    def lines(self) -> _Lines:
        """Linear fit of advantages against rewards in each group."""
        first = np.unique(self.g, return_index=True)[1]
        with np.errstate(all="ignore"):
            slope = mean_of(self.g, self.x * self.a) / self.spread**2
            left = np.abs(self.a - mean_of(self.g, self.a) - slope * self.x)
        size, error = np.zeros((2, len(first)))
        np.maximum.at(size, self.g, np.abs(self.a))
        np.maximum.at(error, self.g, np.nan_to_num(left, nan=np.inf))
        size *= _ROUNDED_16_BIT if is_16_bit(self.a) else _ROUNDED
        r, a = mean_of(self.g, self.r)[first], mean_of(self.g, self.a)[first]
        fits = np.isfinite(slope[first]) & (error <= size)
        return _Lines(self.at[first], r, a, slope[first], self.spread[first], size, fits)

    def of_step(self, reduce: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Return the minimum or maximum (`reduce`) of `values` [N] over the step of each row, [N]."""
        return np.asarray(reduce.reduceat(values, np.flatnonzero(np.diff(self.at, prepend=-1)))[self.at])

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of `values` in each step, [S]."""
        return np.bincount(self.at, values, int(self.at[-1]) + 1)

    def fit(self, x: np.ndarray) -> np.ndarray:
        """Return the correlation between advantages and `x` at each step, [S], over rows where `x` [N] is finite.

        0 if there are fewer than 8 such rows, or if advantages or `x` are constant up to rounding.
        """
        known = np.isfinite(x)
        x, y, at = x[known], self.a[known], self.at[known]
        dx, dy = x - mean_of(at, x), y - mean_of(at, y)
        products = (dx * dx, dy * dy, dx * dy, x * x, y * y, dx == dx)
        xx, yy, xy, x2, y2, n = (np.bincount(at, each, int(self.at[-1]) + 1) for each in products)
        varies = (n >= 8) & (xx > TINY**2 * x2) & (yy > TINY**2 * y2)
        return np.asarray(np.divide(xy, np.sqrt(xx * yy), out=np.zeros(len(n)), where=varies))


class _Lines(NamedTuple):
    """Linear fit of each group's advantages, `a + slope * (reward - r)`. All arrays have shape [G], in step order."""

    at: np.ndarray
    r: np.ndarray
    """Mean reward. `a` is the mean advantage."""
    a: np.ndarray
    slope: np.ndarray
    """NaN if the group's rewards are equal. Then `spread`, their standard deviation, is also NaN."""
    spread: np.ndarray
    rounded: np.ndarray
    """Largest rounding error in the advantages."""
    fits: np.ndarray
    """True if the line reproduces all advantages up to rounding."""

    def units(self, chosen: np.ndarray) -> np.ndarray:
        """Return each group's unit of comparison, [G]: a step, or consecutive steps with few `chosen` groups ([G] bool)."""
        num = np.bincount(self.at, chosen)
        return np.asarray(np.unique((np.cumsum(num) - num) // 4, return_inverse=True)[1][self.at])

    def holds(self, unit: np.ndarray, chosen: np.ndarray, agrees: np.ndarray) -> np.ndarray:
        """Return [S] bool: True if the step's unit has three or more `chosen` groups ([G] bool), and over 95% agree."""
        num, right = (np.bincount(unit, each, unit[-1] + 1) for each in (chosen, chosen & agrees))
        return np.asarray(((num >= 3) & (right > 0.95 * num))[unit[np.unique(self.at, return_index=True)[1]]])


def _median_of(label: np.ndarray, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Replace each value with the median of the `chosen` values ([K] bool) that share its label, or with NaN if there are
    none. Labels must be in ascending order."""
    medians = np.full(int(label.max()) + 1, np.nan)
    label_K, values_K = label[chosen], values[chosen]
    ordered = values_K[np.lexsort((values_K, label_K))]
    known, first, num = np.unique(label_K, return_index=True, return_counts=True)
    middle = (ordered[first + (num - 1) // 2] + ordered[first + num // 2]) / 2
    medians[known] = np.where(np.isnan(ordered[first + num - 1]), np.nan, middle)
    return np.asarray(medians[label])


class _Rules(NamedTuple):
    """Each step's rule for computing advantages from rewards. All arrays have shape [S]."""

    name: np.ndarray
    """`none` if no group's rewards vary, `constant` if rewards vary but advantages do not, `own` if the baseline is the
    group's mean, otherwise a name from `_candidates` or `_baselines`, or empty if no rule fits."""
    correlation: np.ndarray
    """Mean correlation between rewards and advantages within groups, with `freedom` degrees of freedom."""
    freedom: np.ndarray
    between: np.ndarray
    """Standard deviation of the groups' mean advantages, relative to the rms advantage."""
    fit: np.ndarray
    """Correlation between recorded advantages and the best rule's, and in `own`, the group-mean rule's."""
    own: np.ndarray
    factor: np.ndarray
    """Scale of the advantages. NaN if a usual normalisation by group or batch explains it."""
    divided: np.ndarray
    """1 if advantages are divided by the group's standard deviation, -1 if not, 0 if unclear."""
    scale: np.ndarray
    """Rule by which each group's advantages are scaled: empty for a constant factor, None if unknown."""
    is_linear: np.ndarray
    """True if advantages are linear in the rewards in nearly every group."""
    chosen: np.ndarray
    """[N] bool: rows to which `name` applies."""


def _rules_of(rows: _Rows, *, explain: bool) -> _Rules:
    """Find each step's rule for computing advantages from rewards. Without `explain`, only compute correlations."""
    r, a, g, n, sums = rows.r, rows.a, rows.g, rows.n, rows.sums
    y, varies = a - mean_of(g, a), np.isfinite(rows.spread)
    spread_a = rms_of(g, y)
    both = varies & (spread_a > TINY * rms_of(g, a))
    has_both = sums(both) > 0
    correlation = sums(np.divide(rows.x * y, rows.spread * spread_a, out=np.zeros(len(r)), where=both))
    correlation /= np.maximum(sums(both), 1)
    freedom = sums(np.where(has_both[rows.at], both, varies) * (1 - 1 / n))
    name = np.where(correlation > 0.1, "own", "").astype(object)
    between, fit, own, divided, factor = (*np.zeros((4, len(name))), np.full(len(name), np.nan))
    scale, chosen, is_linear = np.full(len(name), None, object), np.ones(len(r), bool), np.zeros(len(name), bool)
    if explain:
        line = rows.lines
        is_known = np.isfinite(line.slope)
        is_linear = line.holds(line.units(is_known), is_known, line.fits)
        between = np.sqrt(sums((a - y - mean_of(rows.at, a)) ** 2) / np.maximum(sums(a * a), 1e-300))
        own = np.maximum(rows.fit(rows.x), rows.fit(rows.x / rows.spread))
        # If the group's mean is the baseline, every group's mean advantage is 0. With any other baseline, the standard
        # deviation of the groups' mean advantages is about 1 / sqrt(n) times that of the advantages.
        has_own = (correlation > 0.5) & (between < 0.1 * np.sqrt(sums(1 / n) / sums(n > 0)))
        name, fit = np.where(has_own, "own", "").astype(object), own
        # In groups with a single success, advantages are linear in the rewards under any rule.
        off = [varies & (np.abs(a - each) > CLOSE * rms_of(g, a)) for each in _left_out_rules(rows)]
        is_left_out = has_both & (np.min([sums(each) for each in off], axis=0) == 0)
        name, has_own = np.where(is_left_out, "leave_one_out", name), has_own & ~is_left_out
        if (rest := has_both & is_linear & ~has_own & ~is_left_out).any():
            baseline, groups = _baseline_of(rows, rest)
            name, other = np.where(rest, baseline, name), line.fits & rest[line.at] & ~groups
            is_whole = other.sum() < 0.05 * groups.sum()
            chosen = ~(rest & (name != ""))[rows.at] | groups[g] | is_whole
            fit = np.where(name == "own", own, rows.fit(mean_of(g, a) + line.slope[g] * rows.x))
        if (rest := has_both & np.isin(name, ["", "own"]) & ~(has_own & (is_linear | (own > 0.99)))).any():
            fits = {name: np.max([rows.fit(each) for each in given], 0) for name, given in _candidates(rows)}
            other = np.array([*fits], object)[np.argmax(np.round([*fits.values()], 3), 0)]  # the first rule wins a tie
            best = np.max([*fits.values()], 0)
            # If the best rule reproduces the advantages only roughly, the true rule is unknown and may be correct.
            is_clear = rest & (best > 1 - _INEXACT) & (own < 0.99) & ~(has_own & ~np.isin(other, [*_OF_OWN]))
            name, fit = np.where(is_clear, other, name), np.where(rest, np.maximum(best, own), fit)
        is_counted = line.holds(line.units(is_known), is_known, is_known)
        name[(name == "own") & is_counted & ~is_linear & (own < 0.99)] = ""
        scale, divided, factor = _scale_of(rows, is_linear & has_own)
    name[~has_both] = np.where(sums(varies) > 0, "constant", "none")[~has_both]
    return _Rules(name, correlation, freedom, between, fit, own, factor, divided, scale, is_linear, chosen)


def _left_out_rules(rows: _Rows) -> list[np.ndarray]:
    """Return NeMo-RL's leave-one-out advantages, [N], which are not divided by a standard deviation of 0, with the
    deviation over n - 1 and over n - 2 values."""
    others, normalised = np.maximum(rows.n - 1, 1), _left_out(rows.r, rows.g)
    scales = (1.0, np.sqrt(np.maximum(others - 1, 1) / others))
    return [np.where(np.isnan(normalised), rows.x * rows.n / others, normalised * scale) for scale in scales]


def _candidates(rows: _Rows) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield the rules that differ from the group-mean rule by more than a group's baseline and scale: the name, and the
    advantages that the variants imply, [N], up to a factor and a constant."""
    r, a, g, n, rank = rows.r, rows.a, rows.g, rows.n, rank_of(rows.g)
    first = rows.of_step(np.minimum, g)
    groups = 1 + rows.of_step(np.maximum, g) - first
    own = [rows.x, rows.x / rows.spread]
    yield "leave_one_out", [_left_out(r, g), *_left_out_rules(rows)]
    # Each advantage's mean over all rows with the same rank (by reward, then by advantage) in groups of the same size.
    varies = np.isfinite(rows.spread)
    label = np.where(varies, 1 + rank_of(g, a, r) + int(n.max()) * n, 0)
    yield "by_rank", [np.where(varies, mean_of(label, a), np.nan)]

    def moments(values: np.ndarray, label: np.ndarray) -> list[np.ndarray]:
        mean = mean_of(label, values)
        deviation = rms_of(label, values - mean)
        return [mean, np.where(deviation > TINY * np.abs(r).max(), deviation, np.nan)]

    def against(values: np.ndarray, mean: np.ndarray, *deviations: np.ndarray) -> list[np.ndarray]:
        return [values - mean, *((values - mean) / each for each in deviations)]

    low, high = rows.of_step(np.minimum, a), rows.of_step(np.maximum, a)
    yield "clipped", [np.clip(scale * own[1], low, high) for scale in (1.0, np.sqrt(1 - 1 / n))]
    strided = moments(r, first + rank_of(rows.at) % groups)
    yield f"mean_of_every_row_{int(np.median(groups))}", against(r, *strided)
    for size in dict.fromkeys([max(int(np.median(n)), 1), *np.unique(n)]):  # a smaller last part joins the one before
        part = np.minimum(rank_of(rows.at) // size, np.maximum(count_of(rows.at) // size, 1) - 1)
        yield f"mean_of_neighbours_{size}", against(r, *moments(r, numbered(part, rows.at)))
    order = np.empty(len(r), np.int64)
    order[np.lexsort((a, g))] = np.lexsort((r, g))
    yield "rewards_in_group", against(r[order], *moments(r[order], g))
    yield "unsigned", [np.abs(each) for each in own]
    yield "divided_by_length", [each / np.maximum(rows.length, 1) for each in own]
    yield "times_length", [each * rows.length for each in own]
    if np.median(n) >= 4:
        yield "half", against(r, *moments(r, 2 * g + (2 * rank >= n)))
    # Reordered advantages have the values of the group-mean rule, in another order.
    usual = [rows.x, *(np.nan_to_num(rows.x / (rows.spread + eps)) for eps in _EPS)]
    by_size = np.argsort(np.lexsort((a, rows.at)))
    reordered = [given[np.lexsort((given, rows.at))][by_size] for given in usual]
    best = int(np.argmax([rows.fit(values).mean() for values in reordered]))
    for name, place in shifted(rows.at, in_group=int(np.median(n))).items():
        moved = np.append(r, np.nan)[place]
        yield name, against(moved, *moments(moved, g))
        yield name.replace("rewards", "advantages"), [np.append(usual[best], np.nan)[place]]
    yield "advantages_in_step", [reordered[best]]


def _baselines(rows: _Rows) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of every known baseline except the group's mean, and its value for each group, [G]."""
    line, g, r = rows.lines, rows.g, rows.r
    count, ordered, rank = np.bincount(g), r[np.lexsort((r, g))], rank_of(g)
    last, half = np.cumsum(count) - 1, count // 2
    median = (ordered[last - half] + ordered[last + 1 - count + half]) / 2
    yield from ((name, values[np.unique(g, return_index=True)[1]]) for name, values in rows.baselines)
    yield "nothing", np.zeros(len(count))
    yield from zip(_LEVELS, (ordered[last], ordered[last + 1 - count], median), strict=True)
    for num in range(1, min(int(np.median(count)), 17)):
        name = f"first_rows_{num}" if num > 1 else "first_row"
        yield name, np.bincount(g, r * (rank < num)) / np.bincount(g, rank < num)
    for name, group in _neighbours(line.at).items():
        yield f"{name}_mean", np.append(line.r, np.nan)[group]
    sets = _sets(rows)
    size = int(np.median(count_of(sets[g])))
    # A baseline shared by a whole step is a batch baseline, which `_baseline_of` finds.
    is_part = np.bincount(line.at, sets != _median_of(line.at, 1.0 * sets, sets == sets))[line.at] > 0
    means = mean_of(sets[g], r)[np.unique(g, return_index=True)[1]]
    yield f"mean_of_some_groups_{size}", np.where(is_part, means, np.nan)
    with np.errstate(all="ignore"):
        shares = 1 - line.a / (line.slope * line.r)
    if np.isfinite(shares).any():
        share = float(np.median(shares[np.isfinite(shares)]))
        yield f"mean_times_{share:.3g}", share * line.r


def _neighbours(at: np.ndarray) -> dict[str, np.ndarray]:
    """Return the index of each group's neighbour, [G], by kind of neighbour; -1 if there is none."""
    start, place = np.searchsorted(at, at), np.arange(len(at))
    before = np.searchsorted(at, at - 1) + place - start
    return {
        "previous_group": start + (place - start - 1) % count_of(at),
        "next_group": start + (place - start + 1) % count_of(at),
        "previous_step": np.where((at > 0) & (before < start), before, -1),
    }


def _sets(rows: _Rows) -> np.ndarray:
    """Return each group's set, [G]: groups of a step whose advantages imply the same baseline. A group with equal rewards
    implies none, so it joins the nearest set whose baseline fits."""
    line = rows.lines
    with np.errstate(all="ignore"):
        base, unit = line.r - line.a / line.slope, np.abs(4 * line.rounded / line.slope)
    label = np.arange(len(base))
    for groups in split_steps(line.at, label.copy()):
        known = groups[np.isfinite(base[groups])]
        if not len(known):
            continue
        order = known[np.argsort(base[known])]
        is_new = np.diff(base[order]) > unit[order][1:]
        label[order] = order[np.r_[0, np.maximum.accumulate(np.arange(1, len(order)) * is_new)]]
        for group in np.setdiff1d(groups, known):
            size = np.abs(line.a[group])
            fitting = known[np.abs((line.r[group] - base[known]) * line.slope[known] - line.a[group]) < CLOSE * size]
            label[group] = label[fitting[np.argmin(np.abs(fitting - group))]] if len(fitting) else group
    return label


def _baseline_of(rows: _Rows, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Identify the baseline at the selected `steps` ([S] bool), up to a constant per step and any scale per group.

    Return the baseline's name at each step ([S], empty if unknown) and which groups' advantages match it ([G] bool).
    """
    line = rows.lines
    asked, equal = line.fits & steps[line.at], np.isnan(line.slope) & steps[line.at]
    error = 2 * line.rounded
    other = asked & (np.abs(line.a) > error)
    best, name, has_name, groups = 0.0, "", np.zeros(len(steps), bool), other
    for candidate, values in _baselines(rows):
        rest = line.a - line.slope * (line.r - values)
        none, known = np.zeros(len(rest)), asked & np.isfinite(rest)
        several = known & (np.bincount(line.at, known)[line.at] > 1)
        for constant, chosen in ((none, other), (_median_of(line.at, rest, known), several)):
            named = line.holds(line.units(chosen), chosen, np.abs(rest - constant) <= error)
            # A group with equal rewards has an advantage of 0 only if the baseline equals its rewards.
            at_base = np.abs(line.a - constant) <= error + CLOSE * np.abs(constant)
            agrees = equal & (at_base == (np.abs(line.r - values) <= TINY * np.abs(rows.r).max()))
            has_other = bool((chosen & other & named[line.at]).any())
            points = has_other * (((chosen & other) | agrees) & named[line.at]).sum()
            points += 0.5 * (has_other and (constant is none or candidate == "nothing"))  # the simpler rule
            if points > best and 2 * (named & steps).sum() >= steps.sum():
                best, has_name, groups = points, named & steps, chosen
                name = "batch_constant" if candidate == "nothing" and constant is not none else candidate
    return np.where(has_name, name, "").astype(object), groups & has_name[line.at]


def _scales(rows: _Rows, unit: np.ndarray, asked: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every known scale's rule, and its factor for each group's advantages, [G], up to a constant. The eps added to a
    standard deviation is fitted per unit, to the `asked` groups ([G] bool)."""
    line, n, spread = rows.lines, np.bincount(rows.g), rows.lines.spread
    yield from (("", np.ones(len(n))), ("", n / (n - 1)), (_DIVIDED, 1 / spread))
    yield _DIVIDED, np.sqrt((n - 1) / n) / spread
    yield "mean", 1 / np.abs(line.r)
    yield "variance", spread**-2
    yield "root_of_deviation", spread**-0.5
    yield "times_deviation", spread
    yield "root_mean_square", 1 / np.hypot(line.r, spread)
    for name, group in _neighbours(line.at).items():
        yield f"{name}_deviation", 1 / np.append(spread, np.nan)[group]
    for ranks in (2, 4, 8):  # each part needs at least two groups
        block = numbered(rank_of(rows.at) * ranks // count_of(rows.at), rows.at)
        is_whole = (count_of(block) >= 2 * rows.n) & (mean_of(rows.g, block) == block)
        scale = np.where(is_whole, 1 / rms_of(block, rows.x), np.nan)[np.unique(rows.g, return_index=True)[1]]
        yield f"deviation_of_part_{ranks}", scale
    # With an eps, 1 / slope is linear in the standard deviation, with the same line for all groups of a unit.
    num = np.maximum(np.bincount(unit, asked), 1)
    inverse = 1 / np.abs(line.slope)
    pair = [np.where(asked, values, 0.0) for values in (spread, inverse)]
    x, y = (np.where(asked, values - (np.bincount(unit, values) / num)[unit], 0.0) for values in pair)
    eps = _median_of(unit, inverse * (np.bincount(unit, x * x) / np.bincount(unit, x * y))[unit] - spread, asked)
    yield _DIVIDED, np.where((eps > 0) & (eps <= max(_EPS)), 1 / (spread + eps), np.nan)
    yield _PLUS, np.where(eps > max(_EPS), 1 / (spread + eps), np.nan)


def _scale_of(rows: _Rows, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find each group's scale at the `steps` ([S] bool): the fields `scale`, `divided` and `factor` of _Rules."""
    line, first = rows.lines, np.unique(rows.lines.at, return_index=True)[1]
    asked = line.fits & steps[line.at]
    unit, size = line.units(asked), np.abs(line.slope)
    scale, factor = np.full(len(steps), None, object), np.full(len(steps), np.nan)
    held = {"": np.full(len(steps), np.nan), _DIVIDED: np.full(len(steps), np.nan)}
    with np.errstate(all="ignore"):
        for name, values in _scales(rows, unit, asked):
            middle = _median_of(unit, size / values, asked & np.isfinite(values))
            fits = line.holds(unit, asked, np.abs(size / values / middle - 1) < CLOSE)
            if name in held:
                held[name] = np.where(fits & np.isnan(held[name]), middle[first], held[name])
            fits &= scale == None  # noqa: E711
            eps = _median_of(unit, 1 / values - line.spread, asked & np.isfinite(values))[first]
            rule = [f"{name}_{each:.3g}" for each in eps] if name == _PLUS else [name] * len(steps)
            scale, factor = np.where(fits, np.array(rule, object), scale), np.where(fits, middle[first], factor)
        usual = _is_usual(rows, held[""], held[_DIVIDED])
        if (unusual := np.isin(scale, [*held]) & ~usual).any():
            # Prefer a constant factor that also fits other steps to a normalisation, which may fit by chance.
            by_chance = np.abs(held[""] / np.median(factor[unusual]) - 1) < CLOSE
            usual &= ~by_chance | np.isfinite(held[_DIVIDED])
    factor[usual | ~np.isin(scale, [*held])] = np.nan
    divided = 1 * np.isfinite(held[_DIVIDED]) - np.isfinite(held[""])
    return scale, divided * (np.bincount(line.at, asked) >= 3), factor


def _is_usual(rows: _Rows, plain: np.ndarray, divided: np.ndarray) -> np.ndarray:
    """Return [S] bool: True if a usual normalisation by group or batch explains the step's scale, a constant (`plain`,
    [S]) or a multiple of 1 / the group's standard deviation (`divided`, [S])."""
    first = np.unique(rows.at, return_index=True)[1]
    few = np.maximum(rows.of_step(np.minimum, rows.n), 2)[first]
    of_x, of_r, of_a = (rms_of(rows.at, each)[first] for each in (rows.x, rows.r - mean_of(rows.at, rows.r), rows.a))
    # A leave-one-out baseline multiplies advantages by n / (n - 1), normalising over tokens changes the standard
    # deviation, and eps can be up to 0.1.
    spread = rows.lines.spread[np.isfinite(rows.lines.spread)]
    size = float(np.mean(spread)) if len(spread) else 1.0
    least = 0.9 * size / (size + max(_EPS)) * np.sqrt(1 - 1 / few)
    by_batch = np.minimum(np.abs(np.log(plain * of_x)), np.abs(np.log(plain * of_r))) < _TOKEN_NATS
    tokens = np.maximum(rows.sums(rows.length), 1)
    mean = rows.sums(rows.a * rows.length) / tokens
    of_tokens = np.sqrt(rows.sums((rows.a - mean[rows.at]) ** 2 * rows.length) / tokens)
    is_whitened = np.minimum(np.abs(of_a - 1), np.abs(of_tokens - 1)) < 0.1
    is_divided = ((divided > least) & (divided < 1.1)) | (np.isfinite(divided) & is_whitened)
    return np.asarray(((plain > 0.9) & (plain < 1.1 * few / (few - 1))) | by_batch | is_divided)


def _batch_constant(rows: _Rows, off: np.ndarray) -> str:
    """Name the constant that was probably subtracted from the rewards at the steps `off` ([S] bool)."""
    num, tokens = rows.sums(rows.at >= 0), rows.of_step(np.maximum, rows.length)
    r, a = (rows.sums(each) / num for each in (rows.r, rows.a))
    spread, unit = (np.sqrt(rows.sums((x - mean_of(rows.at, x)) ** 2) / num + 1e-30) for x in (rows.r, rows.a))
    sums = rows.sums(rows.r * rows.length)
    known = {
        "batch_mean": r, "nothing": 0.0, "token_mean": sums / np.maximum(rows.sums(rows.length), 1),
        "padded_mean": sums / np.maximum(rows.sums(tokens), 1),
    }  # fmt: skip
    left = {name: np.abs(a / unit - (r - constant) / spread) for name, constant in known.items()}
    best = min(left, key=lambda name: float(np.median(left[name][off])))
    return best if np.median(left[best][off]) < 0.01 else "batch_constant"


MIXED = ("advantages_mixed", "some advantages follow a different rule", "in {num:,} rows, advantages have {case}")
_ZEROED = "been set to 0 although their rewards differ"
_OTHERS = "{side}, while all others follow the group's mean and scale{are}{counted}"
_MIXED = data_fault(*MIXED, cases={
    "sign": "the wrong sign{is_of_negative}" + _OTHERS, "factor": "{factor:.3g} times the usual scale" + _OTHERS,
    "zero": _ZEROED + _OTHERS, "zeroed": _ZEROED + "{are}{counted}",
    "divided": "been divided by the group's standard deviation" + _OTHERS,
    "not_divided": "not been divided by the group's standard deviation" + _OTHERS,
    "raw": "the raw reward as their value: all rows except those ranked {ranks} by reward in their group",
    "alone": "the raw reward as their value: they are alone in their group, so they have no baseline",
    "changed": "a different baseline or scale from the rest of their group: they are truncated, and their rewards or advantages may have been changed afterwards",
}, hidden_by=("not_finite",), is_of_negative=", in all groups with a negative mean reward", side=" (exactly the rows whose reward is {side} than their group's mean)", are={
    "truncated": "; they are truncated, and may be left out of the loss on purpose",
    "copies": "; they copy other rows of their step, as padding rows do, but their tokens count toward the loss",
}, counted=", but their rewards count in their groups' baselines")  # fmt: skip


def _mixed(rows: _Rows) -> _Mixed | None:
    """Find rows with a second rule: another factor, sign or normalisation, or advantages of 0 or the raw reward."""
    r, a, g, at, size = rows.r, rows.a, rows.g, rows.at, np.abs(rows.x)
    # Some frameworks set the advantages of rows without tokens in the loss to 0.
    asked = (np.nan_to_num(size / rows.spread) > 1e-3) & (rows.length > 0)
    if asked.sum() < 30:
        return None
    zero, usual = asked & (a == 0), []
    pairs: list[tuple[np.ndarray, np.ndarray, dict[str, Any]]] = []
    # The ratio of the sample's standard deviation to the population's depends on the group size.
    for given in (rows.x, rows.x / rows.spread, rows.x / rows.spread * np.sqrt(1 - 1 / rows.n)):
        ratio = np.divide(a, given, out=np.full(len(a), np.nan), where=asked)
        scale = np.array([_mode(part[part > 0]) for part in split_steps(at, np.abs(ratio))])
        ratio /= scale[at] * (np.sign(np.nansum(np.sign(ratio))) or 1.0)
        usual.append(np.abs(ratio - 1) < CLOSE)
        rest = ratio[asked & ~usual[-1] & ~zero]
        factor = float(np.median(rest)) if len(rest) else 1.0
        rule = "sign" if abs(factor + 1) < CLOSE else "factor"
        # Factors near 1 do not count, because a leave-one-out baseline's n / (n - 1) varies with the group size.
        others = (np.abs(ratio - factor) < CLOSE * abs(factor)) & (abs(factor - 1) > 0.1)
        pairs += [(usual[-1], others, {"signal": rule, "factor": factor}), (usual[-1], zero, {"signal": "zero"})]
    divided = max(usual[1:], key=np.sum)
    fewer = divided.sum() < usual[0].sum()
    pairs += [(usual[0], divided, {"signal": "divided"}) if fewer else (divided, usual[0], {"signal": "not_divided"})]
    if max(each[asked].mean() for each in usual) > 0.97:
        return None
    # Three or more advantages are linear in their rewards only if a rule made them so. The scale may differ by group.
    slope = rows.lines.slope[g]
    linear = (rows.n > 2) & (mean_of(g, np.abs(a - slope * rows.x) < CLOSE * np.abs(slope) * rows.spread) == 1)
    falls = linear & (slope < 0)
    is_of_negative = bool((falls == (mean_of(g, r) < 0))[linear].all())
    pairs += [(linear & (slope > 0), falls, {"signal": "sign", "is_of_negative": is_of_negative})]
    for one, two, numbers in pairs:
        only = two & ~one
        # If the second rule covers whole steps, another finding reports it and its first step.
        within = (rows.sums(only) / np.maximum(rows.sums(asked), 1))[at[only]]
        is_clear = min(only.sum(), (one & ~two).sum()) > 0.05 * asked.sum() and (one | two)[asked].mean() > 0.95
        if is_clear and np.median(within) < 0.95:
            # Algorithms may treat all rows above or below the baseline differently.
            sides = {"higher": asked & (rows.x > 0), "lower": asked & (rows.x < 0)}
            side = next((name for name, each in sides.items() if (only != each).sum() < 0.05 * each.sum()), "")
            return _MIXED, only, {**numbers, "side": side, "notice_if_whole": bool(side)}
    raw, rank = asked & (r != 0) & (np.abs(a - r) < TINY * np.abs(r)), rank_of(g, a, -r)
    share = (1 + np.bincount(rank, raw)) / (1 + np.bincount(rank, asked & (r != 0)))
    is_raw, explained = share > 0.95, raw & (usual[0] | divided)
    if 2 * explained.sum() < raw.sum() and 0 < is_raw.sum() < len(share) and np.all(is_raw | (share < 0.1)):
        ranks = ", ".join(str(each + 1) for each in np.flatnonzero(~is_raw))
        return _MIXED, raw, {"signal": "raw", "ranks": ranks}
    return None


def _mode(values: np.ndarray) -> float:
    """Return the median of the largest cluster of similar values, or NaN if there are no values."""
    values = np.sort(values)
    if not len(values):
        return np.nan
    ends = np.searchsorted(values, values * (1 + CLOSE), "right")
    first = int(np.argmax(ends - np.arange(len(values))))
    return float(np.median(values[first : ends[first]]))


_UNEQUAL = data_fault("advantages_unequal", "equal rewards in a group get different advantages", "{num:,} rows have a different advantage from the other rows with the same reward in their group, {by_length}", hidden_by=("advantages_extreme",), by_length={
    "": "so either rewards were changed or moved to other rows after advantages were computed, or part of each group has its own baseline",
    "more": "and longer responses get more, as if the length changed the rewards",
    "less": "and longer responses get less, as if the length changed the rewards",
})  # fmt: skip
_OF_EQUAL = data_fault("advantages_of_equal", "equal rewards get advantages", "in {num:,} groups with equal rewards, advantages are {size:.3g} instead of 0, as if a rounding error had been divided by a tiny standard deviation")  # fmt: skip
_ROWS_LOST = data_fault("rows_lost", "groups lost rows after their baseline was computed", "in {num:,} groups with fewer than {size} rows, the advantages do not sum to 0, although they do in complete groups, so rows were removed after the advantages were computed", hidden_by=("not_finite",))  # fmt: skip


def _unequal(rows: _Rows, rules: _Rules, kind: np.ndarray) -> _Mixed | None:
    """Find groups in which equal rewards of a `kind` [N] have different advantages or all-equal rewards have nonzero
    ones, and groups whose advantages do not sum to 0 because rows were removed."""
    if np.isin(rules.name, [*_OF_OWN]).any():
        return None  # under these rules, advantages depend on more than the rewards
    a, g, n, is_equal = rows.a, rows.g, rows.n, np.isnan(rows.spread)
    cell = np.unique(np.stack([g, rows.r, rows.length > 0, kind]), axis=1, return_inverse=True)[1]
    order = np.lexsort((a, cell))
    # Among equal rewards in a group, assume that the lower median advantage is correct. With two rows, this is a guess.
    usual = a[order][np.searchsorted(cell[order], cell) + (count_of(cell) - 1) // 2]
    scale, asked = rms_of(g, a - mean_of(g, a)), count_of(cell) > 1
    off, exact = (asked & (np.abs(a - usual) > by * np.maximum(scale, 1e-9)) for by in (0.05, _ROUNDED_16_BIT))
    if 3 <= off.sum() <= exact.sum() < 0.34 * asked.sum():
        order = np.lexsort((rows.length, cell))
        joined = np.diff(cell[order]) == 0
        rise, longer = np.diff(a[order])[joined], np.diff(rows.length[order])[joined] > 0
        differs = np.abs(rise) > _ROUNDED_16_BIT * np.maximum(scale[order][1:][joined], 1e-9)
        is_of_length = bool(longer[differs].all() and np.ptp(np.sign(rise[differs])) == 0)
        by_length = "" if not is_of_length else "more" if rise[differs].max() > 0 else "less"
        return _UNEQUAL, off, {"by_length": by_length, "notice": is_of_length}
    alone, asked = n == 1, (n == 1) & (rows.r != 0)
    raw = asked & (np.abs(a - rows.r) < TINY * np.abs(rows.r))
    off_centre = ~alone & (np.abs(mean_of(g, a)) > CLOSE * rms_of(rows.at, a))
    if raw.sum() >= max(8, 0.95 * asked.sum()) and off_centre.sum() < 0.05 * (~alone).sum():
        return _MIXED, raw, {"signal": "alone"}
    usual_size = float(np.median(np.abs(a[~is_equal]))) if (~is_equal).any() else np.inf
    # Compare with the step's mean: if advantages are whitened over tokens, a group's mean advantage need not be 0.
    usual_mean = (rows.sums(a * ~is_equal) / np.maximum(rows.sums(~is_equal), 1))[rows.at]
    loose = is_equal & (n > 1) & (mean_of(g, kind) == kind) & (np.abs(a - usual_mean) > 0.1 * usual_size)
    # If advantages depend on more than the reward, they vary even in groups with equal rewards. Only groups with nearly
    # constant advantages then count.
    if off[~is_equal].any():
        loose &= scale < 1e-3 * np.abs(a)
    has_own = (rules.name == "own") | (rules.name == "none") | (rules.own > 0.99)
    if loose.sum() > 0.5 * is_equal.sum() >= 3 and has_own.all():
        return _OF_EQUAL, loose, {"num": len(np.unique(g[loose])), "size": np.abs(a)}
    mean, full = np.abs(mean_of(g, a)), n == n.max()
    lost, varies = ~full & (mean > 0.05 * scale) & (scale > 0), ~full & (scale > 0)
    is_whole = 0.2 < full.mean() < 1 and mean[full].max() < 1e-3 * scale.max()
    if is_whole and lost.sum() > 0.5 * varies.sum() >= 3:
        return _ROWS_LOST, lost, {"num": len(np.unique(g[lost])), "size": int(n.max())}
    return None


def _explained(run: DataRows, known: np.ndarray, data: _Rows) -> list[DataFinding] | None:
    """Explain advantages that do not follow from rewards alone, using the reward functions one by one, the KL to the
    reference, or a penalty of truncated rows. Return what is wrong with these terms. None if they do not explain the
    advantages of nearly all groups."""
    if len(run.parts[0]) > 1 and run.parts[2][known].all() and (found := _of_parts(run, known, data)) is not None:
        return found
    truncated = run.ended[known] == "length"
    for name, values in {**{name: each[known] for name, each in run.kl.items()}, "": 1.0 * truncated}.items():
        chosen = np.isfinite(values)
        _, first, cell = np.unique(data.g[chosen], return_index=True, return_inverse=True)
        if not len(first):
            continue
        fit = exact_fits(data.a[chosen], np.c_[data.r, values][chosen], cell)
        ratio, at = fit.slopes[:, 1] / fit.slopes[:, 0], data.at[chosen][first]
        if not fit.hold or np.isfinite(ratio).sum() < 8 or np.nanmedian(fit.slopes[:, 0]) < 0:
            continue
        usual = _median_of(at, ratio, np.isfinite(ratio))
        is_steady = is_constant(ratio / usual)
        if not name:
            # A constant penalty may be intended.
            affected = truncated & (data.length > 0) & (not is_steady)
            numbers: dict[str, Any] = {"signal": "changed"}
            if not data.a[affected].any():
                numbers = {"signal": "zeroed", "are": "truncated", "counted": bool(run.counts_masked)}
            return [*run.find(_MIXED, affected, rows=known, notice=True, **numbers)]
        if is_steady:
            coefficient = np.full(len(chosen), np.nan)
            coefficient[chosen] = usual[cell]
            return [*_of_kl(run, known, name, coefficient)]
    return None


_KL_WRONG = data_fault("kl_penalty_wrong", "the KL penalty {signal}", "within groups, advantages are the rewards {coefficient:+.3g} times {term} over the response's tokens, {case}", BY_GROUP, cases={
    "sign": "so training moves the policy away from the reference",
    "averaged": "so a long response's divergence costs no more than a short one's, unlike with a sum",
    "coefficient": "although {recorded} is recorded, unless rewards were scaled beforehand",
}, words=lambda n: {"recorded": " and ".join(f"{key} = {value:g}" for key, value in n.get("recorded", {}).items())}, term=_KL_FORMS, signal={
    "sign": "has the wrong sign", "averaged": "is averaged over tokens", "coefficient": "has a different coefficient than recorded",
})  # fmt: skip


def _of_kl(run: DataRows, known: np.ndarray, form: str, coefficient: np.ndarray) -> Iterator[DataFinding]:
    """Judge a KL penalty in the rewards, given the coefficient of train - reference in each row, [N]."""
    given = run.numbers(r"kl_(ctrl[./])?(penalty_)?coef$|(^|[./])(init_kl_coef|kl_beta|beta)$")
    size = np.abs(coefficient)
    is_given = any(abs(value - np.nanmedian(size)) < CLOSE * value for value in given.values())
    find = partial(run.find, _KL_WRONG, rows=known, term=form, coefficient=coefficient)
    if (coefficient > 0).any():
        yield from find(coefficient > 0, signal="sign")
    elif form == "mean":
        yield from find(size > 0, signal="averaged", notice=True)
    elif given and not is_given and is_constant(size):
        yield from find(size > 0, signal="coefficient", recorded=given, notice=True)


def _shares(numbers: Mapping[str, Any]) -> dict[str, str]:
    names = {key: " and ".join(numbers.get(key, ())) for key in ("of_group", "of_batch")}
    sums = {key: numbers.get(key, {}).items() for key in ("weights", "expected")}
    return names | {key: " + ".join(f"{weight:.3g} {name}" for name, weight in terms) for key, terms in sums.items()}


_OF_PARTS = data_fault("advantages_of_parts", "reward functions are {signal}", {
    "normalised": "advantages are the sum of reward functions: {of_group} normalised within each group, {of_batch} by one factor in the whole batch",
    "weighted": "advantages are {weights}, up to a factor, {are_normalised}, but {are_recorded} {expected}",
}, BY_GROUP, words=_shares, signal={"normalised": "normalised over different rows", "weighted": "weighted differently in the advantages"},
    are_normalised={True: "each normalised within its group", False: "added"}, are_recorded={True: "the recorded weights are", False: "the reward is"},
)  # fmt: skip


def _of_parts(run: DataRows, known: np.ndarray, data: _Rows) -> list[DataFinding] | None:
    """Judge advantages that are a sum of reward functions, each of which may be normalised by itself (GDPO)."""
    names, parts = np.array(run.parts[0]), np.nan_to_num(run.parts[1][known], posinf=0.0, neginf=0.0)
    fit, first = exact_fits(data.a, parts, data.g), np.unique(data.g, return_index=True)[1]
    if not fit.hold:
        return None
    varies = np.isfinite(fit.slopes).any(axis=0)
    names, parts, slopes, at = names[varies], parts[:, varies], fit.slopes[:, varies], data.at[first]
    spread = np.stack([rms_of(data.g, each - mean_of(data.g, each))[first] for each in parts.T], axis=1)
    shares = np.abs(slopes * spread)
    is_zero, main = shares < 1e-3 * np.nanmax(shares), int(np.nansum(shares, axis=0).argmax())
    find = partial(run.find, _OF_PARTS, data.at >= 0, rows=known)

    def steady(values: np.ndarray) -> np.ndarray:
        """Return [K] bool: whether each column of `values` [G, K] is constant within steps."""
        usual = np.stack([_median_of(at, each, np.isfinite(each)) for each in values.T], axis=1)
        return np.array([is_constant(each) for each in np.where(is_zero, 1.0, values / usual).T])

    def medians(values: np.ndarray) -> np.ndarray:
        """Return each column's median, [K], NaN if no group has a value."""
        return np.array(
            [np.median(each[np.isfinite(each)]) if np.isfinite(each).any() else np.nan for each in values.T]
        )

    with np.errstate(all="ignore"):
        own, whole = steady(slopes * spread), steady(slopes)
        is_own = bool(own.all())
        terms = slopes * spread if is_own else slopes
        if not is_own and not steady(terms / terms[:, [main]]).all():
            if not (own | whole).all():
                return None
            is_intended = not run.setting("", "gdpo|normali[sz]e_then_sum")
            numbers: dict[str, Any] = {"of_group": names[own].tolist(), "of_batch": names[~own].tolist()}
            return [*find(signal="normalised", notice=is_intended, **numbers)]
        expected = np.array([run.weights.get(name, np.nan) for name in names])
        if not (is_declared := bool(np.isfinite(expected).all())):
            expected = exact_fits(data.r, parts, np.zeros(len(parts), int)).slopes[0]
        if expected[main] * np.nanmedian(terms[:, main]) < 0:
            return None  # the sign is wrong
        expected[np.abs(expected) < 1e-9 * np.fmax.reduce(np.abs(expected))] = 0.0
        expected = expected / (expected[main] or 1.0)
        size = np.ones(len(names)) if is_own else np.median(spread, axis=0) / np.median(spread[:, main])
        # An eps that is added to small standard deviations lowers the weights that the advantages imply.
        variants = [slopes * (spread + eps) for eps in _EPS[:3]] if is_own else [terms]
        implied = [medians(each / each[:, [main]]) for each in variants]
        off = [np.abs(each - expected) * size > np.maximum(0.01, CLOSE * np.abs(expected) * size) for each in implied]
        if not all(each.any() for each in off):
            return []
    kept = np.isfinite(implied[0] + expected)
    shown = [np.round(given, 3)[kept] + 0.0 for given in (implied[0], expected)]
    weights, expected_weights = (dict(zip(names[kept].tolist(), given.tolist(), strict=True)) for given in shown)
    numbers = {"weights": weights, "expected": expected_weights, "are_normalised": is_own, "are_recorded": is_declared}
    return [*find(signal="weighted", notice=not is_declared, **numbers)]


def _padded(data: _Rows, rules: _Rules) -> np.ndarray:
    """Return the steps ([S] bool) at which a mean over the batch's tokens and padding was subtracted after the groups'
    means. The advantages' means over rows and over tokens then imply the padded length, the same one at all steps."""
    num, tokens = (np.maximum(data.sums(each), 1) for each in (data.at >= 0, data.length))
    by_row, by_token = data.sums(data.a) / num, data.sums(data.a * data.length) / tokens
    least = 1e-3 * np.sqrt(data.sums(data.a**2) / num)
    off = (rules.name == "own") & (np.fmin(np.abs(by_row), np.abs(by_token)) > least)
    width = tokens / num * (1 - np.divide(by_token, by_row, out=np.zeros(len(num)), where=off))
    longest = np.maximum(np.maximum.reduceat(data.length, np.unique(data.at, return_index=True)[1]), 1)
    usual = max(float(np.median(width[off])), 1.0) if off.any() else np.nan
    of_step, of_run = (off & (np.abs(width / given - 1) < 1e-3) for given in (longest, usual))
    fits = of_step if of_step.sum() >= of_run.sum() else of_run & (width > longest)
    return np.asarray(fits & (fits.sum() >= max(3, 0.95 * off.sum())))


_CONSTANT = data_fault("advantages_constant", "constant advantages", "at {num_steps} steps, advantages are equal within each {scope} (mean {value:g}) although rewards differ{single_rows}", BY_GROUP, single_rows={
    "groups": "; the baseline is the group's mean, but each group contains a single row",
    "prompts": "; every row has its own prompt, so groups formed by prompt contain a single row",
})  # fmt: skip
_INVERTED = data_fault("advantages_inverted", "advantages have the wrong sign", "advantages decrease as rewards increase: their correlation within groups is {correlation:.3f}", BY_GROUP)  # fmt: skip
_SCALED = data_fault("advantages_scaled", "advantages have an unusual scale", "advantages are the rewards minus the baseline, {case}", BY_GROUP, cases={
    "factor": "{is_divided}multiplied by {factor:.3g}, which no usual normalisation explains", "rule": "{rule}",
}, words=rule_words, hidden_by=("advantages_by_length",), is_divided="divided by the group's standard deviation and ")  # fmt: skip
_UNLIKE_SETTINGS = data_fault("advantages_unlike_settings", "advantages contradict the recorded settings", "{setting} is recorded, but advantages are rewards minus the group's mean, {is_divided} by the group's standard deviation", BY_GROUP, is_divided={True: "divided", False: "not divided"})  # fmt: skip
_BASELINE = data_fault("baseline", "the baseline is not the group's mean", "advantages are rewards minus {rule} (fit {fit:.4f}; with the group's mean {own:.4f})", BY_GROUP, words=rule_words)  # fmt: skip
_BASELINE_UNKNOWN = data_fault("baseline_unknown", "advantages do not average 0 within groups", "the groups' mean advantages have a standard deviation of {between:.2f} times the rms advantage, and no known baseline fits", BY_GROUP, hidden_by=("advantages_extreme",))  # fmt: skip
_UNEXPLAINED = data_fault("advantages_unexplained", "advantages do not follow from rewards alone", "within groups, advantages {are_monotone} (correlation {correlation:.3f}), and no known rule reproduces them", BY_GROUP, are_monotone={True: "rise with the rewards, but not in proportion", False: "are not a function of the recorded rewards"})  # fmt: skip
UNRELATED = data_fault("advantages_unrelated", "advantages do not follow rewards", "the correlation between advantages and rewards within each {scope} is {correlation:.3f} (up to {error:.2f} by chance){part}", BY_GROUP, hidden_by=("advantages_mixed",), part={
    "shorter": " in rows shorter than their step's longest, but {rest:.3f} in the others",
    "truncated": " in truncated rows, but {rest:.3f} in the others",
    "all": "; this is also the case if a critic predicts the rewards",
})  # fmt: skip
OF_OTHER_ROWS = data_fault("rewards_of_other_rows", "rewards belong to other rows", "advantages follow other rows' rewards ({rule}: fit {fit:.4f}); as recorded, their correlation with rewards is {correlation:.3f} within each {scope}", BY_GROUP, words=rule_words)  # fmt: skip
_CLIPPED = data_fault("advantages_clipped", "advantages are clipped", "advantages are clipped to the range {low:.3g} to {high:.3g} (fit {fit:.4f})", BY_GROUP)  # fmt: skip
_BY_LENGTH = data_fault("advantages_by_length", "advantages are scaled by the response length", "advantages are rewards minus the group's mean, {rule} (fit {fit:.4f}; without the length {own:.4f})", BY_GROUP, words=rule_words)  # fmt: skip
_BY_RANK = data_fault("advantages_by_rank", "advantages follow the reward's rank", "advantages depend only on the rank of the reward within its group (fit {fit:.4f}; with the group's mean {own:.4f})", BY_GROUP)  # fmt: skip
_UNSIGNED = data_fault("advantages_unsigned", "advantages have lost their sign", "advantages are the absolute values of rewards minus the group's mean (fit {fit:.4f}; with signed values {own:.4f})", BY_GROUP)  # fmt: skip
_OF_RULES = {
    "clipped": _CLIPPED, "divided_by_length": _BY_LENGTH, "times_length": _BY_LENGTH, "half": _BASELINE, "by_rank": _BY_RANK,
    "unsigned": _UNSIGNED,
}  # fmt: skip
_OF_OWN = tuple(rule for rule in _OF_RULES if rule != "unsigned")
"""Rules under which a group's advantages still sum to about 0."""


def check_advantages(run: DataRows) -> Iterator[DataFinding]:
    known = np.isfinite(run.rows["reward"]) & np.isfinite(run.rows["advantage"])
    turns: list[tuple[str, np.ndarray]] = []
    if len(run.continued[0]):  # only a trajectory's last row has the outcome as its reward
        response, reward, (row, later) = run.rows["response"], np.nan_to_num(run.rows["reward"]), run.continued
        last, order = np.arange(len(reward)), np.argsort(run.rows["prompt_length"][later], kind="stable")
        known &= (response > 0) & ~np.isin(last, row)
        last[row[order]] = later[order]  # the last turn has the longest prompt
        turns = [("mean_of_turns", mean_of(run.cell, reward[last])), ("mean_of_own_turns", mean_of(run.cell, reward))]
    if run.counts_masked is False:
        known &= run.trains
    r, a, length = (run.rows[name][known] for name in ("reward", "advantage", "loss_length"))
    labels = run.labels[known]
    at = np.unique(run.rows["step"][known], return_inverse=True)[1]
    if not len(at):
        return
    group = numbered(labels, at)
    is_grouped = bool(np.mean((count_of(group) > 1) & (labels > 0)) > 0.5)
    explain = is_grouped and not run.is_per_token
    baselines = tuple((name, values[known]) for name, values in turns)
    data = _Rows(r, a, group if is_grouped else at, at, length, baselines)
    rules = _rules_of(data, explain=explain)
    if is_grouped and not run.rows["group"].any() and not (explain and "own" in rules.name):
        is_grouped = explain = False  # rows with the same prompt need not be a group
        rules = _rules_of(data := _Rows(r, a, at, at, length), explain=False)
    is_judged = rules.name != "none"
    num_judged, judged = int(is_judged.sum()), is_judged[at]

    def found(fault: DataFault, chosen: np.ndarray, **given: Any) -> Iterator[DataFinding]:
        yield from run.find(fault, (chosen[at] & rules.chosen)[judged], rows=np.flatnonzero(known)[judged], **given)

    constant = rules.name == "constant"
    if rules.freedom[constant].sum() >= 4 and not run.is_per_token:
        values = a[constant[at]]
        is_same = np.ptp(values) == 0 and values[0] != 0  # such as rows chosen for supervised training
        numbers: dict[str, Any] = {"value": float(values.mean()), "num_steps": int(constant.sum())}
        are_single = bool((labels > 0).all() and count_of(group).max() == 1)
        numbers["scope"] = "group" if is_grouped else "step"
        own_prompts = run.rows["prompt"].all() and count_of(numbered(run.rows["prompt"], run.at)).max() == 1
        numbers["single_rows"] = "groups" if are_single else "prompts" if is_grouped and own_prompts else ""
        yield from found(_CONSTANT, constant, notice=is_same, **numbers)
    is_open = explain and (~data.lines.fits)[has_slope := np.isfinite(data.lines.slope)].sum() > 0.05 * has_slope.sum()
    if is_open and (explained := _explained(run, known, data)) is not None:
        yield from explained
        return
    scaled = np.isfinite(rules.factor)
    is_last = scaled[(rules.scale != None) & (np.cumsum(scaled) > 0)]  # noqa: E711
    factor = float(np.median(rules.factor[scaled])) if scaled.any() else np.nan  # groups may differ in scale
    is_often = 10 * scaled.sum() > num_judged and np.mean(is_last) > 0.5
    if is_often and np.ptp(rules.factor[scaled]) < 0.1 * factor:
        is_divided = bool(np.mean(rules.scale[scaled] == _DIVIDED) > 0.5)
        yield from found(_SCALED, scaled, signal="factor", factor=factor, is_divided=is_divided, notice_if_whole=True)
    shapes = Counter(each for each in rules.scale if each not in ("", _DIVIDED, "mean", None))
    shape, num = shapes.most_common(1)[0] if shapes else ("", 0)
    is_shaped = is_judged & ~np.isin(rules.scale, ["", _DIVIDED, "mean"])
    if num >= 3 and 2 * num > is_shaped.sum() and is_shaped[is_judged][-is_shaped.sum() :].all():
        is_foreign = any(each in shape for each in ("previous", "next"))  # no algorithm divides by another group's
        yield from found(_SCALED, is_shaped, signal="rule", rule=shape, notice_if_whole=not is_foreign)
    scaling = r"(^|[./])(scale_rewards|norm_adv_by_std_in_grpo|normali[sz]e_by_std)$"
    divides, keeps = (run.setting(scaling, f"^({x})$") for x in (r"group|true|1\.0", r"batch|none|false|0\.0"))
    if explain and (divides or keeps) and np.all(rules.name[is_judged] == "own"):
        is_wrong = rules.divided == (-1 if divides else 1)
        if is_wrong.sum() > 9 * (rules.divided == (1 if divides else -1)).sum():
            yield from found(_UNLIKE_SETTINGS, is_wrong, setting=divides or keeps, is_divided=not divides)
    if explain and (padded := _padded(data, rules)).any():
        own = float(rules.own[padded].min())
        yield from found(_BASELINE, padded, fit=1.0, own=own, rule="group_and_padded_mean")
    others = Counter(name for name in rules.name if name not in ("own", "leave_one_out", "constant", "none", ""))
    name, num = others.most_common(1)[0] if others else ("", 0)
    if 2 * num < others.total() + (rules.name == "").sum():
        name = ""  # with only a few small steps, some rule fits by chance
    if explain and not name and "leave_one_out" not in rules.name:
        parts, is_given = (each[known] for each in run.parts[1:])
        kind = np.unique(parts, axis=0, return_inverse=True)[1].ravel() if parts.size else 0 * at
        is_empty = is_given & np.isnan(parts).all(axis=1)  # not compared
        rest = _mixed(data) or _unequal(data, rules, np.where(is_empty, -1 - np.arange(len(at)), kind))
        if rest:
            fault, affected, more = rest
            # With the KL penalty in the rewards, advantages depend on more than the recorded scores.
            if fault is _UNEQUAL and run.switched_on(KL_IN_REWARD):
                more["notice"] = True
            if fault is _MIXED and not data.a[affected].any():
                is_truncated = bool((run.ended[known] == "length")[affected].mean() > 0.95)
                are = "truncated" if is_truncated else "copies" if _are_copies(run, known, affected) else ""
                more.update(are=are, counted=is_truncated and bool(run.counts_masked), notice=is_truncated)
            yield from run.find(fault, affected, rows=known, **more)
            return
    # Steps with few groups allow several rules.
    off = (rules.name == name) | ((rules.name == "") & (num > 4 * (rules.name == "").sum()))
    freedom = float(rules.freedom[off].sum())
    if not freedom:
        return
    # At steps where the rewards of only a few groups vary, even the right rule can fail to fit.
    is_small = 3 * np.median(rules.freedom[off]) < np.median(rules.freedom[is_judged])
    correlation, error = float(rules.correlation[off] @ rules.freedom[off]) / freedom, _ERRORS / freedom**0.5
    values = a[off[at]]
    numbers = {key: float(np.median(getattr(rules, key)[off])) for key in ("fit", "own", "between")} | {
        "correlation": correlation, "error": error, "scope": "group" if is_grouped else "step", "low": values.min(), "high": values.max(), "rule": name,
    }  # fmt: skip
    is_batch = name in ("batch_constant", "nothing")
    # An unknown baseline, such as the reward of a greedy response, can be the same for all groups at some steps.
    parts = (rules.name == "", rules.name == "own", is_judged)
    unknown, own, every = (float(rules.freedom[each].sum()) for each in parts)
    is_elsewhere_unknown = unknown > max(0.05 * every, own)
    is_change = 3 <= off.sum() <= num_judged - 3 and off[is_judged][-off.sum() :].all() and not is_small
    if correlation < -(0.95 if name else 0.9 if run.is_per_token else 0.5) and correlation + error < 0:
        yield from found(_INVERTED, off, **numbers)
    elif is_batch and is_elsewhere_unknown:
        yield from found(_BASELINE_UNKNOWN, off | (rules.name == ""), notice=True, **numbers)
    elif is_batch:
        # Include steps that are too small or where all groups have the same mean: the batch rule may apply there, too.
        is_alone = np.bincount(data.lines.at) == 1
        off |= (rules.name == "") | ((rules.name == "own") & ((data.fit(r) > 0.999) | is_alone))
        numbers["rule"] = name if name == "nothing" else _batch_constant(data, off)
        is_other = run.setting(ALGORITHM, "reinforce|gae|ppo|batch|global|running|critic|remax")
        # A mean that includes padding is always a fault, but an unknown baseline may be an intended running mean.
        is_padded, is_unknown = (numbers["rule"] == name for name in ("padded_mean", "batch_constant"))
        is_unknown &= not run.setting(ALGORITHM, "running|critic|ema|moving")
        can_be_right = not is_padded and bool(is_other or not run.group_setting)
        baseline = found(_BASELINE, off, notice_if_whole=can_be_right, **numbers)
        yield from (each for each in baseline if each.since is not None or not is_other or is_padded or is_unknown)
    elif name:
        is_moved = name.startswith(("rewards_", "advantages_"))
        fault = _OF_RULES.get(name, OF_OTHER_ROWS if is_moved else _BASELINE)
        notice = name in _OF_OWN and name != "half"
        yield from found(fault, off, notice=notice, notice_if_whole=name in (*_LEVELS[1:], "mean_of_turns"), **numbers)
    elif correlation + error < (0.5 if is_grouped else 0.1) and not run.is_per_token:
        yield from found(UNRELATED, off, **numbers)
    elif explain and (is_change or (run.group_setting and 2 * off.sum() > num_judged)):
        if rules.is_linear[off].any():
            yield from found(_BASELINE_UNKNOWN, off, notice=True, **numbers)
        else:
            yield from found(_UNEXPLAINED, off, notice_if_whole=True, are_monotone=_are_monotone(data, off), **numbers)


def _are_copies(run: DataRows, known: np.ndarray, zeroed: np.ndarray) -> bool:
    """Return whether the `known` rows ([N] bool) with advantage 0 (`zeroed`) are copies of other rows in their step."""
    counts = known & (run.rows["response"] > 0) & (run.rows["loss_length"] > 0)
    is_copy = (counts & (count_of(numbered(run.rows["response"], run.at)) > 1))[known]
    return bool(is_copy[zeroed].mean() >= 0.95 and is_copy[~zeroed].mean() <= 0.5)


def _are_monotone(rows: _Rows, steps: np.ndarray) -> bool:
    """Return whether advantages rise with the rewards within the groups of the `steps` ([S] bool)."""
    order = np.lexsort((rows.a, rows.r, rows.g))
    order = order[steps[rows.at[order]]]
    joined = np.diff(rows.g[order]) == 0
    more, rise = np.diff(rows.r[order])[joined], np.diff(rows.a[order])[joined]
    least = 2 * rows.lines.rounded[rows.g[order]][1:][joined]
    return bool(np.mean(np.where(more > 0, rise >= -least, np.abs(rise) <= least)) > 0.99)
