"""The sequences of a run, and how their rewards, advantages and logprobs go together.

Shapes: N sequences, in the order of their recording.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import ks_2samp

from ...schemas.passes import REFERENCE
from ..statement import Measured
from ..trace.cache import cached
from ..trace.columns import sequence_columns
from ..trace.database import Database
from ..trace.source import Pair
from . import thresholds as t

_ROWS = """
SELECT s.step, prompt, response, whole, "group", reward, s.advantage, s.first_advantage, length, num_masked, coalesce(train.mean, sampled.mean) AS likelihood,
       sampled.mean AS sampled, referred.mean AS reference, s.opening, ending, train.opening AS opening_trained, sampled.opening AS opening_sampled
FROM (
    SELECT *, row_number() OVER () AS place
    FROM (
        SELECT step, seq_id, hash(prompt_ids) AS prompt, hash(response_ids) AS response,
               hash(prompt_ids, response_ids) AS whole,
               hash(prompt_ids, response_ids[1:$opening]) AS opening, coalesce(response_ids[-1], -1) AS ending,
               hash(step, coalesce(group_id, hash(prompt_ids)::VARCHAR)) AS "group", reward,
               coalesce(advantage, list_avg(advantages)) AS advantage, coalesce(advantage, advantages[1]) AS first_advantage,
               {masked}::DOUBLE AS num_masked, num_response_tokens - num_masked AS length
        FROM sequences
    )
) AS s
LEFT JOIN (
    SELECT step, seq_id, {mean} AS mean, list_avg(logprobs[1:$opening]) AS opening
    FROM scores{masks} WHERE "pass" = $scored AND iteration = 0
) AS train USING (step, seq_id)
LEFT JOIN (
    SELECT step, seq_id, {mean} AS mean, list_avg(logprobs[1:$opening]) AS opening
    FROM scores{masks} WHERE "pass" = $sampled AND iteration = 0
) AS sampled USING (step, seq_id)
LEFT JOIN (
    SELECT step, seq_id, {mean} AS mean FROM scores{masks} WHERE "pass" = $reference AND iteration = 0
) AS referred USING (step, seq_id)
ORDER BY s.step, s.place
"""
"""Lists become numbers before rows are joined and put in order, so that no list is kept."""
_OF_ALL = {"mean": "list_avg(logprobs)", "masks": "", "masked": "0"}
_OF_COUNTED = {
    "mean": "CASE WHEN response_mask IS NULL THEN list_avg(logprobs) "
    "ELSE list_avg(list_filter(logprobs, lambda logprob, place: response_mask[place])) END",
    "masked": "coalesce(num_response_tokens - list_sum(response_mask::TINYINT[]), 0)",
    "masks": " JOIN (SELECT step, seq_id, response_mask FROM sequences) USING (step, seq_id)",
}
"""Parts of _ROWS, without a mask and with one: what a tool wrote is no choice of the policy."""
_LEAST_SORTED = 3
"""Members of a group, at least, whose rewards may be called sorted."""
_FARTHEST = 16
"""Rows by which rewards are looked for in a wrong place."""
OPENING = 3
"""Tokens of a response that count as its opening."""
_ALONE = 0.5
"""Share of sequences without another one in their group from which steps are compared instead."""
_BY_CHANCE = 1.32
"""Standard errors, 1 / sqrt(n - 1), of a correlation that one of ten passes by chance."""
_FEWEST = 30
"""Comparisons below which there is no answer."""
_KEPT_STEPS = 8
"""Steps on either side of one at which rewards may have changed their rows: the policy stays about what it is."""
_FEWEST_KEPT = 3
"""The fewest of them."""
_FEWEST_OF_LENGTH = 5
"""Responses of one length, and lengths, that say how rewards go with length."""
_FEWEST_OF_LENGTH_IN_STEP, _FEWEST_LENGTHS_IN_STEP = 3, 3
"""Responses of a length in a step, and such lengths, from which it is told how far length explains its rewards."""
_FEWEST_SPANNING = 10
"""Responses on both sides of a step below which it is not looked at."""
CERTAIN_LOGPROB = 1e-3
"""Nats below which an opening is certain: of what is certain nothing moves."""
_EQUAL = 1e-4
"""Nats by which two logprobs of one opening of a step differ at most; batches of other shapes round otherwise."""
_FEWEST_IN_STEP = 20
"""Pairs of equal responses of one step below which they say nothing."""
_PROMPTS_AWAY = 8
"""Prompts of a step by which the one that a response was graded by is looked for in a wrong place."""
_INTERVAL = 1.92
"""Logarithm of a likelihood ratio that bounds a 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The sequences of a run."""

    step: np.ndarray
    """[N] int64"""
    prompt: np.ndarray
    """[N] a hash of the prompt's ids."""
    response: np.ndarray
    """[N] a hash of the response's ids."""
    whole: np.ndarray
    """[N] a hash of the prompt's and the response's ids."""
    group: np.ndarray
    """[N] number of the group: sequences of one step with one group_id, or with one prompt where there is none; of the
    step where hardly a group has two."""
    reward: np.ndarray
    """[N] float64; NaN where not recorded."""
    advantage: np.ndarray
    """[N] of the response, or the mean of its tokens'; NaN where not recorded."""
    first_advantage: np.ndarray
    """[N] that of the first token, where each has its own; else the response's."""
    length: np.ndarray
    """[N] tokens of the response that count."""
    num_masked: np.ndarray
    """[N] tokens of it that do not: what a tool wrote."""
    likelihood: np.ndarray
    """[N] mean logprob of the response's tokens that count as the trainer scored them, nats; as the engine did where it did not."""
    sampled: np.ndarray
    """[N] mean logprob of the same tokens as the engine returned them, nats; NaN where not recorded."""
    reference: np.ndarray
    """[N] the same as the reference model scored them; NaN where not recorded."""
    ending: np.ndarray
    """[N] id of the response's last token; -1 where it has none."""
    opening: np.ndarray
    """[N] a hash of the prompt's ids and the response's first OPENING ones, which come again more often than all of it."""
    opening_trained: np.ndarray
    """[N] mean logprob of these few as the trainer scored them, nats; NaN where not recorded."""
    opening_sampled: np.ndarray
    """[N] the same as the engine returned them."""

    @property
    def num_tokens(self) -> np.ndarray:
        """[N] tokens of the response, which a limit is of."""
        return np.asarray(self.length + self.num_masked)

    @property
    def counted(self) -> np.ndarray:
        """[N] uint64: a hash of the prompt, the response and how many of its tokens count; a mean logprob is over those."""
        return _graded(self.whole, self.num_masked)

    @property
    def distance(self) -> np.ndarray:
        """[N] by how much more likely the response is to the policy than to the reference, nats."""
        return np.asarray((self.likelihood - self.reference) * self.length)

    @property
    def reward_size(self) -> np.ndarray:
        """[N] by how much the reward is off its group's mean."""
        return np.asarray(np.abs(centred(self.reward, self.group)))

    @property
    def advantage_size(self) -> np.ndarray:
        """[N] the advantage without its sign."""
        return np.asarray(np.abs(self.advantage))

    @property
    def information(self) -> np.ndarray:
        """[N] -logprob of the whole response, nats."""
        return np.asarray(-self.likelihood * self.length)

    @property
    def is_alone(self) -> bool:
        """Whether responses have no group but their step."""
        return len(np.unique(self.group)) == len(np.unique(self.step))

    @property
    def likelihood_by_step(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] steps and [n] the mean likelihood of their responses, where it is known."""
        return self._by_step(self.likelihood)

    @property
    def sampled_by_step(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] steps and [n] the mean logprob of their responses as the engine returned it, where it is known."""
        return self._by_step(self.sampled)

    @property
    def reference_distance_by_step(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] steps and [n] by how much more likely their responses are to the policy than to the reference, nats a token."""
        return self._by_step(self.likelihood - self.reference)

    def _by_step(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known = np.isfinite(values)
        steps, place = np.unique(self.step[known], return_inverse=True)
        return steps, np.bincount(place, values[known]) / np.maximum(np.bincount(place), 1)

    def keeps_reference(self, step: int) -> bool:
        """Whether the reference model scores responses that came before a step and after it as it did; not without any."""
        same = _same(self, "reference")
        order = np.lexsort((self.step, same))
        same, at, reference = (values[order] for values in (same, self.step, self.reference))
        spans = (same[1:] == same[:-1]) & (at[:-1] < step) & (at[1:] >= step)
        moved = np.abs(reference[1:] - reference[:-1])[spans]
        moved = moved[np.isfinite(moved)]
        return bool(len(moved)) and float(np.median(moved)) <= t.REFERENCE_MOVES

    @property
    def share_below_group(self) -> float:
        """Share of the sequences that earn less than their group does; NaN without rewards."""
        less = centred(self.reward, self.group)
        least = 1e-6 * float(np.fmax.reduce(np.abs(self.reward), initial=1.0))
        return float((less[np.isfinite(less)] < -least).mean()) if np.isfinite(less).any() else math.nan

    def prompts_of(self, step: int) -> np.ndarray:
        """The prompts of a step's sequences, in order."""
        first, last = np.searchsorted(self.step, [step, step + 1])
        return np.sort(self.prompt[first:last])

    def since(self, step: int) -> Rollouts:
        """The sequences from a step on."""
        return self.ordered(self.step >= step)

    def until(self, step: int) -> Rollouts:
        """The sequences up to a step."""
        return self.ordered(self.step <= step)

    def at_step(self, step: int) -> Rollouts:
        """The sequences of a step, in the order of their recording."""
        first, last = np.searchsorted(self.step, [step, step + 1])
        return self.ordered(slice(first, last))

    def ordered(self, places: np.ndarray | slice) -> Rollouts:
        """The sequences of some places, in the order of these; or those of [N] bool."""
        return Rollouts(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})

    def at(self, steps: Sequence[int]) -> Rollouts:
        """The sequences of some steps."""
        return self.ordered(np.isin(self.step, steps))


@cached
def read_rollouts(database: Database, pair: Pair = ("train", "rollout")) -> Rollouts:
    """Read the sequences of the one run that is open; the passes of `pair` say how likely each was to trainer and engine."""
    parameters = {"scored": pair[0], "sampled": pair[1], "reference": REFERENCE, "opening": OPENING}
    with database.following("reading sequences"):
        rows = _ROWS.format(**(_OF_COUNTED if sequence_columns(database).mask else _OF_ALL))
        table = database.connection.sql(rows, params=parameters).to_arrow_table()
    columns = {name: table[name].to_numpy() for name in table.column_names}
    columns["group"] = _groups(columns["group"], columns["step"])
    return Rollouts(**columns)


def _groups(group: np.ndarray, step: np.ndarray) -> np.ndarray:
    """[N] numbers of groups; of steps where most sequences are alone in theirs: what is compared has to have company."""
    _, number, count = np.unique(group, return_inverse=True, return_counts=True)
    alone = (count[number] == 1).mean() if len(number) else 0.0
    groups: np.ndarray = np.unique(step, return_inverse=True)[1] if alone > _ALONE else number
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedResponses:
    """Responses that came twice: a deterministic reward is the same both times."""

    num_pairs: int
    unequal: float
    """Share of the pairs whose rewards differ; NaN without pairs."""
    shift: int
    """Rows by which rewards would have to move so that the fewest pairs differ; 0: they lie where they should."""
    unequal_shifted: float
    """The share of unequal pairs then."""
    mean_difference: float
    """Mean size of the difference of unequal pairs."""
    order: str = ""
    """The other order of a step's rows, of ORDERS, in which the fewest pairs differ; empty where that is a shift, or none."""

    @property
    def lies_off(self) -> bool:
        """Whether rewards that are moved back by `shift` rows, or from `order`, differ much less."""
        return (self.shift != 0 or self.order != "") and self.unequal_shifted < t.UNEQUAL_SHIFTED * self.unequal


def repeated_responses(rollouts: Rollouts) -> RepeatedResponses:
    """Compare the rewards of equal responses to equal prompts, where they lie and moved by some rows within a step."""
    order = np.lexsort((rollouts.step, rollouts.whole))
    whole = rollouts.whole[order]
    again = whole[1:] == whole[:-1]
    least = least_reward(rollouts)
    num, unequal, mean_difference = _unequal(rollouts.reward[order], again, least)
    shift, unequal_shifted, other = 0, unequal, ""
    if unequal > 0:
        shares = {by: _unequal(_moved(rollouts, by)[order], again, least)[1] for by in range(-_FARTHEST, _FARTHEST + 1)}
        shift = min(shares, key=lambda by: (shares[by], abs(by)))
        orders = {name: _unequal(rollouts.reward[_ordered(rollouts, name)][order], again, least)[1] for name in ORDERS}
        other = min(orders, key=orders.__getitem__)
        shift, other = (0, other) if orders[other] < shares[shift] else (shift, "")
        unequal_shifted = orders[other] if other else shares[shift]
    return RepeatedResponses(
        num_pairs=num,
        unequal=unequal,
        shift=shift,
        unequal_shifted=unequal_shifted,
        mean_difference=mean_difference,
        order=other,
    )


ORDERS = (
    "reversed", "reversed_in_groups", "members_first", "groups_first", "next_in_groups", "previous_in_groups", "halves",
    "shortest_first", "longest_first", "shortest_first_in_groups", "last_step",
)  # fmt: skip
"""Orders that code takes a step's rows for by mistake: the last row first; of each group the last member first; the first members of
all groups first, or the other way round; each member's place taken by the next one of its group, or by the one before; the second
half of the step first; in the order in which generations end, or the other way round; the rows of the step before."""


def _ordered(rollouts: Rollouts, name: str) -> np.ndarray:
    """[N] the row whose reward a row takes if rewards came in another order; itself where groups are not of one size."""
    firsts = np.flatnonzero(np.r_[True, rollouts.step[1:] != rollouts.step[:-1]])
    lasts = np.r_[firsts[1:], len(rollouts.step)]
    place = np.arange(len(rollouts.step))
    if name == "last_step":
        for first, last, end in zip(firsts, lasts, lasts[1:], strict=False):
            if last - first == end - last:  # what this step earned is recorded with the next one
                place[first:last] = np.arange(last, end)
        return place
    for first, last in zip(firsts, lasts, strict=True):
        rows, group = place[first:last].copy(), rollouts.group[first:last]
        if name in ("reversed", "halves"):
            place[first:last] = rows[::-1] if name == "reversed" else np.roll(rows, len(rows) // 2)
            continue
        if name in ("shortest_first", "longest_first", "shortest_first_in_groups"):
            length = rollouts.length[first:last] * (-1 if name == "longest_first" else 1)
            place[
                rows[np.lexsort((length, group)) if name.endswith("groups") else np.argsort(length, kind="stable")]
            ] = rows
            continue
        starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
        size = len(rows) // len(starts)
        if (np.diff(np.r_[starts, len(rows)]) != size).any():
            continue
        by_group = rows.reshape(-1, size)
        place[first:last] = {
            "reversed_in_groups": by_group[:, ::-1],
            "next_in_groups": np.roll(by_group, 1, axis=1),
            "previous_in_groups": np.roll(by_group, -1, axis=1),
            "members_first": by_group.T,
            "groups_first": rows.reshape(size, -1).T,
        }[name].reshape(-1)
    return place


def sorted_share(rollouts: Rollouts) -> tuple[float, float]:
    """Of groups with several rewards, the share whose rewards lie in falling order, or in rising if that is more; and by chance.

    NaN where fewer than 30 groups have several.
    """
    if not len(rollouts.group):
        return math.nan, math.nan
    starts = np.flatnonzero(np.r_[True, rollouts.group[1:] != rollouts.group[:-1]])
    falling = rising = num = 0
    by_chance = 0.0
    for first, last in zip(starts, np.r_[starts[1:], len(rollouts.group)], strict=True):
        rewards = rollouts.reward[first:last]
        if last - first < _LEAST_SORTED or not np.isfinite(rewards).all() or np.ptp(rewards) == 0:
            continue
        steps, counts = np.diff(rewards), np.unique(rewards, return_counts=True)[1]
        num, falling, rising = num + 1, falling + int((steps <= 0).all()), rising + int((steps >= 0).all())
        by_chance += math.exp(sum(math.lgamma(count + 1) for count in counts) - math.lgamma(last - first + 1))
    return (max(falling, rising) / num, by_chance / num) if num >= _FEWEST else (math.nan, math.nan)


def _unequal(reward: np.ndarray, again: np.ndarray, least: float) -> tuple[int, float, float]:
    """Of rewards in the order of their responses, neighbours of one response: how many, the share that differs, by how much."""
    difference = _differences(reward, again)
    if len(difference) < _FEWEST:
        return 0, math.nan, math.nan
    differs = difference > least
    return len(difference), float(differs.mean()), float(difference[differs].mean()) if differs.any() else 0.0


def _differences(reward: np.ndarray, again: np.ndarray) -> np.ndarray:
    """[M] by how much the known rewards of neighbours differ, of those that are one response: `again`, [N - 1] bool."""
    return np.asarray(np.abs(np.diff(reward))[again & np.isfinite(reward[1:]) & np.isfinite(reward[:-1])])


def _moved(rollouts: Rollouts, shift: int) -> np.ndarray:
    """[N] each row takes the reward of the row `shift` after it within its step, around the step's end."""
    firsts = np.flatnonzero(np.r_[True, rollouts.step[1:] != rollouts.step[:-1]])
    sizes = np.diff(np.r_[firsts, len(rollouts.step)])
    first, size = np.repeat(firsts, sizes), np.repeat(sizes, sizes)
    moved: np.ndarray = rollouts.reward[first + (np.arange(len(first)) - first + shift) % size]
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """How far two quantities of sequences go together within groups."""

    correlation: float
    """Of all values less their group's mean; NaN where there is nothing to compare."""
    by_group: float
    """Mean of the groups' own correlations."""
    num_groups: int
    """Groups in which both have a spread."""
    negative: float
    """Share of these whose own correlation is lower than one group of ten has by chance: below -0.5 of eight members."""


def relation(rollouts: Rollouts, first: str, second: str) -> Relation:
    """Correlate two columns within groups, over all and group by group; NaN where fewer than 30 groups have a spread.

    A baseline and a division by the group's spread leave the correlation of rewards and advantages at 1 in each group.
    """
    x, y, known = _in_groups(rollouts, first, second)
    group = rollouts.group[known]
    xy, xx, yy = (np.bincount(group, product) for product in (x * y, x**2, y**2))
    spread = (xx > 1e-12) & (yy > 1e-12)
    num = int(spread.sum())
    if num < _FEWEST:
        return Relation(correlation=math.nan, by_group=math.nan, num_groups=num, negative=math.nan)
    by_group = xy[spread] / np.sqrt(xx[spread] * yy[spread])
    members = np.bincount(group)[spread]
    return Relation(
        correlation=float(xy.sum() / np.sqrt(xx.sum() * yy.sum())),
        by_group=float(by_group.mean()),
        num_groups=num,
        negative=float((by_group < -_BY_CHANCE / np.sqrt(np.maximum(members - 1, 1))).mean()),
    )


def _in_groups(rollouts: Rollouts, first: str, second: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two columns where both are known, less their means within groups; and [N] bool: where that is."""
    columns = [getattr(rollouts, name) for name in (first, second)]
    known = np.isfinite(columns[0]) & np.isfinite(columns[1])
    x, y = (centred(column[known], rollouts.group[known]) for column in columns)
    return x, y, known


def relation_by_step(rollouts: Rollouts, first: str, second: str) -> tuple[np.ndarray, np.ndarray]:
    """[n] steps in which some group has a spread of both columns, and [n] their correlation within the groups of the step."""
    x, y, known = _in_groups(rollouts, first, second)
    steps, of_step = np.unique(rollouts.step[known], return_inverse=True)
    xy, xx, yy = (np.bincount(of_step, product, len(steps)) for product in (x * y, x**2, y**2))
    spread = (xx > 1e-12) & (yy > 1e-12)
    return steps[spread], xy[spread] / np.sqrt(xx[spread] * yy[spread])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedResponses:
    """Responses that came before a step and after it, and what they are given since: a reward, or a reference's logprob."""

    step: int
    """The first step with other values."""
    num_responses: int
    share: float
    """Of them that are given something else since."""
    share_before: float
    """Of the responses that came twice before `first`, those that were given something else then; NaN without any."""
    length_correlation: float
    """Of the differences and the lengths of the responses, over all or within steps; 0 where one of them has no spread."""
    is_of_one_length: bool
    """Whether those that are given something else have one length, so that nothing can be said of lengths."""
    agreement: float = 0.0
    """Correlation of what the responses were given before the step and since; 0 where one of them has no spread."""
    low: int = 0
    """The first step of the 95 % interval of the change."""
    high: int = 0
    """The last one."""

    is_earlier: bool = False
    """Whether it came long before the fall that is looked at."""

    @property
    def is_rescaled(self) -> bool:
        """Whether the responses are in the same order as before, so that only the scale or the level is another one."""
        return self.agreement > t.SAME_ORDER and abs(self.length_correlation) <= t.LENGTH_EXPLAINS

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers of the sentences about it."""
        return {"step": self.step, "num_responses": self.num_responses, "share": self.share}

    def around(self, rollouts: Rollouts) -> tuple[Rollouts, Rollouts]:
        """The sequences since the change and those before it, without the steps of its interval in which it may have come."""
        return rollouts.since(self.high), rollouts.until(self.low - 1)


def changed_responses(
    rollouts: Rollouts, column: str, *, first: int, last: int, least: float
) -> ChangedResponses | None:
    """The step from `first` to `last` at which most of the repeated responses begin to be given something else.

    `column` is what they are given, `least` the least size of a difference. None where fewer than 10 came on both sides of
    every such step.
    """
    same = _same(rollouts, column)
    order = np.lexsort((rollouts.step, same))
    same, step, given, length = same[order], *(getattr(rollouts, name)[order] for name in ("step", column, "length"))
    again = (same[1:] == same[:-1]) & np.isfinite(given[1:]) & np.isfinite(given[:-1]) & (step[1:] > step[:-1])
    low, high, difference = step[:-1][again], step[1:][again], (given[1:] - given[:-1])[again]
    differs = np.abs(difference) > least
    before = differs[high < first]
    best: ChangedResponses | None = None
    for at in np.unique(step[(step >= first) & (step <= last)]):
        spans = (low < at) & (high >= at)
        num = int(spans.sum())
        share = float(differs[spans].mean()) if num >= _FEWEST_SPANNING else 0.0
        if num >= _FEWEST_SPANNING and (best is None or share > best.share):
            chosen = spans & differs
            lengths = length[:-1][again][chosen]
            by_length = length_correlation(difference[chosen], lengths, high[chosen])
            steadily = correlation(difference[chosen], lengths * (high - low)[chosen])  # what a token earns grows
            if abs(steadily) > max(abs(by_length), t.LENGTH_EXPLAINS_WITHIN):
                by_length = steadily
            best = ChangedResponses(
                step=int(at), num_responses=num, share=share,
                share_before=float(before.mean()) if len(before) else math.nan,
                length_correlation=by_length, is_of_one_length=len(np.unique(lengths)) == 1,
                agreement=correlation(given[:-1][again][spans], given[1:][again][spans]),
            )  # fmt: skip
    if best is None:
        return None
    inside = (high >= first) & (low <= last)
    _, earliest, latest = step_interval(differs[inside], low[inside], high[inside])
    return replace(best, low=min(earliest, best.step), high=max(latest, best.step))


def _same(rollouts: Rollouts, column: str) -> np.ndarray:
    """[N] hashes that are equal for responses whose values of a column can be compared; a mean logprob is over the tokens that count."""
    return rollouts.counted if column == "reference" else rollouts.whole


def step_interval(differs: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[int, int, int]:
    """The most likely step of a change and its 95 % interval, from pairs: those with one before it and one since differ more.

    `differs` [M] bool; `low` and `high` [M], the steps of both.
    """
    steps = np.unique(high)
    first, last = np.searchsorted(steps, low, side="right"), np.searchsorted(steps, high)
    spanning = _spanning(first, last, np.ones(len(differs)), len(steps))
    differing = _spanning(first, last, differs.astype(float), len(steps))
    others, differing_others = len(differs) - spanning, int(differs.sum()) - differing
    likelihood = _likelihood(differing, spanning) + _likelihood(differing_others, others)
    is_higher = (differing + 0.5) * (others + 1) > (differing_others + 0.5) * (spanning + 1)
    likelihood[~is_higher] = _likelihood(differs.sum(keepdims=True), np.array([len(differs)]))
    kept = steps[likelihood >= likelihood.max() - _INTERVAL]
    return int(steps[likelihood.argmax()]), int(kept[0]), int(kept[-1])


def _spanning(first: np.ndarray, last: np.ndarray, weight: np.ndarray, num: int) -> np.ndarray:
    """[num] the weight of the intervals, places `first` to `last`, that hold each place."""
    held: np.ndarray = np.cumsum(np.bincount(first, weight, num + 1) - np.bincount(last + 1, weight, num + 1))[:num]
    return held


def _likelihood(num_differing: np.ndarray, num: np.ndarray) -> np.ndarray:
    """Logarithm of the likelihood that so many of `num` pairs differ, at the probability that fits them."""
    rate = (num_differing + 0.5) / (num + 1)
    likelihood: np.ndarray = num_differing * np.log(rate) + (num - num_differing) * np.log1p(-rate)
    return likelihood


def unequal_share(rollouts: Rollouts, column: str, least: float) -> float:
    """Share of repeated responses that are given two things, more than `least` apart; NaN where fewer than 30 came again."""
    same = _same(rollouts, column)
    order = np.lexsort((rollouts.step, same))
    same = same[order]
    return _unequal(getattr(rollouts, column)[order], same[1:] == same[:-1], least)[1]


def unequal_in_step(rollouts: Rollouts) -> tuple[int, float]:
    """Pairs of equal responses to equal prompts within a step, and the share of them with two rewards; NaN below 20 pairs.

    Policy and reward are the same within a step, so that a reward that depends on the response alone gives such a pair one value.
    """
    order = np.lexsort((rollouts.whole, rollouts.step))
    whole, step, reward = (values[order] for values in (rollouts.whole, rollouts.step, rollouts.reward))
    difference = _differences(reward, (whole[1:] == whole[:-1]) & (step[1:] == step[:-1]))
    is_enough = len(difference) >= _FEWEST_IN_STEP
    return len(difference), float((difference > least_reward(rollouts)).mean()) if is_enough else math.nan


def unequal_openings(rollouts: Rollouts) -> tuple[float, float]:
    """Share of equal openings of one step to which the engine, and to which the trainer, gives two logprobs; NaN below 20 pairs."""
    known = np.isfinite(rollouts.opening_sampled) & np.isfinite(rollouts.opening_trained)
    order = np.lexsort((rollouts.opening[known], rollouts.step[known]))
    opening, step, sampled, trained = (
        values[known][order]
        for values in (rollouts.opening, rollouts.step, rollouts.opening_sampled, rollouts.opening_trained)
    )
    again = (opening[1:] == opening[:-1]) & (step[1:] == step[:-1]) & (trained[1:] < -CERTAIN_LOGPROB)
    if again.sum() < _FEWEST_IN_STEP:
        return math.nan, math.nan
    of_engine, of_trainer = (float((np.abs(np.diff(values))[again] > _EQUAL).mean()) for values in (sampled, trained))
    return of_engine, of_trainer


def least_reward(rollouts: Rollouts) -> float:
    """The least difference of two rewards that counts."""
    known = rollouts.reward[np.isfinite(rollouts.reward)]
    return max(1e-9, t.MATERIAL_REWARD * float(known.std())) if len(known) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Sequences that the trainer scores otherwise than the engine, and whether its logprobs are the engine's of another row."""

    step: int
    num_other: int
    share: float
    """Of them, those with the mean logprob that the engine has of another row of the step; or of the row at one distance."""
    by_chance: float
    """The share with one that it has of a row of the step before; or, the median one, of the row at other distances."""

    @property
    def explains(self) -> bool:
        """Whether logprobs lie in other rows of their step; of a policy that is certain many rows are alike, and nearly all have to fit."""
        is_all = 1 - self.share <= t.NONE_LEFT * (1 - self.by_chance)
        return (self.share >= t.OTHER_ROWS and self.by_chance <= t.OTHER_ROWS * self.share) or is_all

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers of its evidence."""
        return {"step": self.step, "num_responses": self.num_other, "share": self.share, "chance_share": self.by_chance}


def scored_rows(rollouts: Rollouts, step: int, least: float) -> ScoredRows | None:
    """Hold the trainer's mean logprobs of the steps from one on against the engine's of the other rows; None with fewer than 30 that differ.

    `least`: nats from which two mean logprobs differ.
    """
    shifts = [by for by in range(-_FARTHEST, _FARTHEST + 1) if by]
    counts, beside = np.zeros(3, int), np.zeros(len(shifts))
    steps = np.unique(rollouts.step)
    for place in np.flatnonzero((steps >= step) & (steps < step + _KEPT_STEPS)):
        now, last = rollouts.at_step(int(steps[place])), rollouts.at_step(int(steps[max(place - 1, 0)]))
        other = np.flatnonzero(np.abs(now.likelihood - now.sampled) > least)
        counts += (
            len(other),
            is_near(now.likelihood[other], now.sampled, least).sum(),
            is_near(now.likelihood[other], last.sampled, least).sum(),
        )
        beside += [(np.abs(now.likelihood - np.roll(now.sampled, by))[other] <= least).sum() for by in shifts]
    if counts[0] < _FEWEST:
        return None
    found = ScoredRows(
        step=step, num_other=int(counts[0]), share=float(counts[1] / counts[0]), by_chance=float(counts[2] / counts[0])
    )
    shares = beside / counts[0]
    of_one_shift = replace(found, share=float(shares.max()), by_chance=float(np.median(shares)))
    is_one_shift = of_one_shift.explains and of_one_shift.share >= t.MOST
    return of_one_shift if is_one_shift and not found.explains else found


def is_near(values: np.ndarray, known: np.ndarray, least: float) -> np.ndarray:
    """[n] bool: whether some known value lies within `least` of each."""
    known = np.sort(known[np.isfinite(known)])
    if not len(known):
        return np.zeros(len(values), bool)
    place = np.searchsorted(known, values)
    below, above = known[np.maximum(place - 1, 0)], known[np.minimum(place, len(known) - 1)]
    return np.asarray(np.minimum(np.abs(values - below), np.abs(values - above)) <= least)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderedRewards:
    """Rewards that are no longer what the same responses earned, and whether their steps still have those in other rows."""

    num_other: int
    """Responses that came before and earn something else since."""
    num_lacking: int
    """Of these, at least so many whose earlier reward no row of their step has."""
    lacking_by_chance: float
    """How many would lack it, were the others' rewards drawn from all that were given since."""

    @property
    def is_permuted(self) -> bool:
        """Whether each step has the rewards that its responses earned before, in other rows."""
        return (
            self.lacking_by_chance >= t.LACKING and self.num_lacking <= t.LACKING_OF_PERMUTED * self.lacking_by_chance
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRewards:
    """The rewards of the steps from a step on beside those of the steps before it, whatever row they lie in."""

    step: int
    mean_before: float
    mean: float
    apart: float
    """Largest distance of the two distributions, 0 to 1 (Kolmogorov and Smirnov's)."""
    spread: float
    """Standard deviation of all these rewards."""
    in_sd: float
    """How far the means of the steps lie apart, in standard errors."""

    @property
    def are_same(self) -> bool:
        """Whether the same rewards are given: where responses earn others than before, they lie in other rows."""
        return self.apart <= t.SAME_REWARDS and (
            abs(self.in_sd) <= t.SAME_REWARDS_SD or abs(self.mean - self.mean_before) <= t.SAME_REWARDS * self.spread
        )


def kept_rewards(rollouts: Rollouts, step: int) -> KeptRewards | None:
    """Compare the rewards of up to eight steps from a step on with those of as many before; None with fewer than three of either."""
    before, since = (
        rollouts.until(step - 1).since(step - _KEPT_STEPS),
        rollouts.since(step).until(step + _KEPT_STEPS - 1),
    )
    of_rows, of_steps = [], []
    for part in (before, since):
        known = np.isfinite(part.reward)
        steps, place = np.unique(part.step[known], return_inverse=True)
        of_rows.append(part.reward[known])
        of_steps.append(np.bincount(place, part.reward[known]) / np.maximum(np.bincount(place), 1))
        if len(steps) < _FEWEST_KEPT:
            return None
    error = math.sqrt(sum(float(means.var(ddof=1)) / len(means) for means in of_steps))
    difference = float(of_steps[1].mean() - of_steps[0].mean())
    return KeptRewards(
        step=step, mean_before=float(of_steps[0].mean()), mean=float(of_steps[1].mean()),
        apart=float(ks_2samp(*of_rows).statistic), spread=float(np.concatenate(of_rows).std()), in_sd=difference / max(error, 1e-12),
    )  # fmt: skip


def reordered_rewards(rollouts: Rollouts, step: int) -> ReorderedRewards:
    """Compare the rewards of each step from `step` on, as a whole, with what its responses earned before."""
    least = least_reward(rollouts)
    known = _earned_before(rollouts, step)
    since = (rollouts.step >= step) & np.isfinite(rollouts.reward)
    other = since & (np.abs(rollouts.reward - known) > least)
    drawn = np.where(np.isfinite(known), known, rollouts.reward)
    drawn[other] = np.random.default_rng(0).choice(rollouts.reward[since], int(other.sum())) if other.any() else 0.0
    lacking, by_chance = 0, 0
    for at in np.unique(rollouts.step[other]):
        rows = since & (rollouts.step == at)
        earned = known[rows & np.isfinite(known)]
        lacking += _lacking(earned, rollouts.reward[rows], least)
        by_chance += _lacking(earned, drawn[rows], least)
    return ReorderedRewards(num_other=int(other.sum()), num_lacking=lacking, lacking_by_chance=by_chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPromptsRewards:
    """Rewards that are those which the same responses earned under another prompt of their step."""

    shift: int
    """Prompts of the step from a response's own to the one that it was graded by."""
    num_responses: int
    """Responses that earned a reward under that prompt before."""
    equal: float
    """Share of them that have this reward now."""
    by_chance: float
    """The share that would have it, were theirs drawn from all rewards since."""

    @property
    def explains(self) -> bool:
        """Whether the responses were graded by that prompt."""
        return self.equal >= t.GRADED_ELSEWHERE and self.by_chance <= t.GRADED_BY_CHANCE


def rewards_of_other_prompts(rollouts: Rollouts, step: int) -> OtherPromptsRewards | None:
    """Compare rewards from `step` on with what the same responses earned under neighbouring prompts before.

    None where fewer than 30 came under any neighbour.
    """
    least = least_reward(rollouts)
    since = (rollouts.step >= step) & np.isfinite(rollouts.reward)
    latest_first = np.flatnonzero((rollouts.step < step) & np.isfinite(rollouts.reward))[::-1]
    graded, place = np.unique(_graded(rollouts.prompt, rollouts.response)[latest_first], return_index=True)
    if not len(graded):
        return None
    earned, given = rollouts.reward[latest_first][place], np.sort(rollouts.reward[since])
    best: OtherPromptsRewards | None = None
    for shift in sorted((by for by in range(-_PROMPTS_AWAY, _PROMPTS_AWAY + 1) if by), key=abs):
        moved = _prompt_beside(rollouts, shift)
        rows = np.flatnonzero(since & (moved != rollouts.prompt))
        wanted = _graded(moved[rows], rollouts.response[rows])
        at = np.searchsorted(graded, wanted).clip(max=len(graded) - 1)
        came = graded[at] == wanted
        if came.sum() < _FEWEST:
            continue
        before, now = earned[at[came]], rollouts.reward[rows[came]]
        alike = np.searchsorted(given, before + least, side="right") - np.searchsorted(given, before - least)
        equal = float((np.abs(now - before) <= least).mean())
        if best is None or equal > best.equal:
            best = OtherPromptsRewards(
                shift=shift, num_responses=int(came.sum()), equal=equal, by_chance=float(alike.mean()) / len(given)
            )
    return best


def _graded(prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """[N] uint64: a number of each prompt with its response."""
    return prompt.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + response.astype(np.uint64)


def _prompt_beside(rollouts: Rollouts, shift: int) -> np.ndarray:
    """[N] the prompt that comes `shift` prompts after a row's own in its step, around the step's end."""
    starts_step = np.r_[True, rollouts.step[1:] != rollouts.step[:-1]]
    starts = starts_step | np.r_[True, rollouts.prompt[1:] != rollouts.prompt[:-1]]
    place = np.cumsum(starts) - 1
    prompts = rollouts.prompt[starts]
    first = place[starts_step][np.cumsum(starts_step) - 1]
    size = np.bincount(np.cumsum(starts_step)[starts] - 1)[np.cumsum(starts_step) - 1]
    beside: np.ndarray = prompts[first + (place - first + shift) % size]
    return beside


def _earned_before(rollouts: Rollouts, step: int) -> np.ndarray:
    """[N] what the same response earned when it last came before a step; NaN where it did not."""
    _, number = np.unique(rollouts.whole, return_inverse=True)
    earned = np.full(int(number.max(initial=-1)) + 1, np.nan)
    before = (rollouts.step < step) & np.isfinite(rollouts.reward)
    earned[number[before]] = rollouts.reward[before]
    known: np.ndarray = earned[number]
    return known


def _lacking(wanted: np.ndarray, given: np.ndarray, least: float) -> int:
    """How many of the wanted values no given one is left for, each given one being used once."""
    given = np.sort(given)
    place, lacking = 0, 0
    for value in np.sort(wanted):
        place += int(np.searchsorted(given[place:], value - least))
        if place < len(given) and given[place] <= value + least:
            place += 1
        else:
            lacking += 1
    return lacking


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one of them has no spread."""
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0 else 0.0


def length_correlation(difference: np.ndarray, length: np.ndarray, step: np.ndarray) -> float:
    """Of what rewards differ by and the lengths of their responses: over all of them, or the mean within steps where that explains all.

    What a token earns may grow by the step, so that within each step alone it is in proportion.
    """
    overall = correlation(difference, length)
    _, of_step = np.unique(step, return_inverse=True)
    x, y = centred(difference, of_step), centred(length.astype(float), of_step)
    xy, xx, yy = (np.bincount(of_step, product) for product in (x * y, x**2, y**2))
    spread = (xx > 1e-12) & (yy > 1e-12) & (np.bincount(of_step) > 2)
    weight = (np.bincount(of_step) - 1)[spread]
    if weight.sum() < _FEWEST_SPANNING:
        return overall
    within = float(np.average(xy[spread] / np.sqrt(xx[spread] * yy[spread]), weights=weight))
    return within if abs(within) > max(abs(overall), t.LENGTH_EXPLAINS_WITHIN) else overall


def reward_differences(first: np.ndarray, second: np.ndarray, scale_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N] differences of the rewards of equal responses, NaN where one is not known, and [N] bool: beyond rounding.

    `scale_of`: rewards whose largest size is what rounding is a share of.
    """
    difference = first - second
    scale = float(np.fmax.reduce(np.abs(scale_of), initial=1.0))
    return difference, np.abs(difference) > 1e-6 * scale


def shared_responses(run: Rollouts, control: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """[M] the places of the equal responses to equal prompts in the one and in the other, the first one of each."""
    _, at_a, at_b = np.intersect1d(run.whole, control.whole, return_indices=True)
    return at_a, at_b


def explained_by_length(run: Rollouts, control: Rollouts) -> tuple[float, float]:
    """Share of the variance of what equal responses earn otherwise that their lengths explain; and which way it goes.

    The length, or the length beside the mean of its group; or the length of those that earned alike, beyond what these have in common,
    where that is a material part. What is paid goes up with it, or down, or away from one length. 0 where fewer than two lengths have
    five responses, or nothing differs.
    """
    at_a, at_b = shared_responses(run, control)
    difference, base = run.reward[at_a] - control.reward[at_b], control.reward[at_b]
    known = np.isfinite(difference)
    difference, base, at = difference[known], base[known], at_a[known]
    length = run.length[at]
    counts = np.unique(length, return_counts=True)[1]
    total = float(((difference - difference.mean()) ** 2).sum()) if len(difference) else 0.0
    num_other = int((np.abs(difference) > 1e-9).sum())
    if (counts >= _FEWEST_OF_LENGTH).sum() < 2 or num_other < _FEWEST_OF_LENGTH or total <= 1e-12 * len(difference):
        return 0.0, 0.0
    found = [_explained(difference, length), _explained(difference, centred(run.length, run.group)[at])]
    alike = np.unique(np.round(base, 6), return_inverse=True)[1]
    rest = centred(difference, alike)
    if float((rest**2).sum()) >= t.MATERIAL_REST * total:
        found.append(_explained(rest, length))
    return max(found)


def _explained(values: np.ndarray, length: np.ndarray) -> tuple[float, float]:
    """Share of the variance of values that goes up or down with lengths, or away from one of five and more; and the sign of that."""
    lengths, place, counts = np.unique(length, return_inverse=True, return_counts=True)
    total = float(((values - values.mean()) ** 2).sum())
    means = np.bincount(place, values) / counts
    within = float(((values - means[place]) ** 2).sum())
    lefts = {1.0: _from_monotone(means, counts, increasing=True), -1.0: _from_monotone(means, counts, increasing=False)}
    goes = min(lefts, key=lambda sign: lefts[sign])
    left = lefts[goes]
    if len(lengths) >= _FEWEST_OF_LENGTH:
        for top in range(2, len(lengths) - 1):
            for up in (True, False):
                parts = ((slice(0, top), up), (slice(top, None), not up))
                left = min(left, sum(_from_monotone(means[part], counts[part], increasing=way) for part, way in parts))
    return 1 - (within + left) / total, goes


def _from_monotone(means: np.ndarray, counts: np.ndarray, *, increasing: bool) -> float:
    """Summed squares of what is left of means, each of some values, beside the best sequence that goes one way."""
    if len(means) < 2:
        return 0.0
    fitted = isotonic_regression(means, weights=counts, increasing=increasing).x
    return float(counts @ (means - fitted) ** 2)


def pays_length_otherwise(run: Rollouts, control: Rollouts) -> float:
    """How the reward goes with length where it does in some sequences and not in those that they are held against; 0 where it does not.

    The correlation of lengths with what equal responses earn beyond the others' reward; or that of lengths and rewards within groups,
    where almost all of them earn something else and lengths go that way.
    """
    at_a, at_b = shared_responses(run, control)
    difference, differs = reward_differences(run.reward[at_a], control.reward[at_b], control.reward)
    chosen = np.isfinite(difference) & differs
    overall = length_correlation(difference[chosen], run.length[at_a][chosen], run.step[at_a][chosen])
    is_other = len(differs) > 0 and differs.mean() > t.ALMOST_ALL
    if chosen.sum() > 2 and abs(overall) > (t.LENGTH_EXPLAINS if is_other else t.LENGTH_IS_ALL):
        return overall
    within, of_control = (relation(part, "length", "reward").correlation for part in (run, control))
    is_paid = abs(within) > t.LENGTH_PAYS and not abs(of_control) > t.LENGTH_PAYS / 2
    goes = _latest(run).length.mean() - control.length.mean()
    return within if is_paid and is_other and goes * within > 0 else 0.0


def _latest(rollouts: Rollouts) -> Rollouts:
    """The last quarter of the sequences."""
    return rollouts.ordered(slice(3 * len(rollouts.step) // 4, None))


def centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[N] values less the mean of the known ones of their group."""
    known = np.isfinite(values)
    total = np.bincount(group, np.where(known, values, 0.0))
    count = np.bincount(group, known.astype(float))
    centred: np.ndarray = values - (total / np.maximum(count, 1))[group]
    return centred


def explained_by_length_by_step(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """[n] steps of which three lengths and more have three rewards each, and [n] the share of these rewards' variance that the length explains.

    Adjusted for the number of lengths, so that it is 0 on average where length says nothing.
    """
    known = np.isfinite(rollouts.reward)
    length = rollouts.length[known].astype(np.int64)
    longest = int(length.max(initial=0)) + 1
    _, place, count = np.unique(rollouts.step[known] * longest + length, return_inverse=True, return_counts=True)
    kept = (count >= _FEWEST_OF_LENGTH_IN_STEP)[place]
    steps, of_step = np.unique(rollouts.step[known][kept], return_inverse=True)
    _, first, place = np.unique(place[kept], return_index=True, return_inverse=True)
    reward, lengths = rollouts.reward[known][kept], np.bincount(of_step[first], minlength=len(steps))
    num = np.bincount(of_step, minlength=len(steps))
    own = reward - (np.bincount(of_step, reward) / np.maximum(num, 1))[of_step]
    left = reward - (np.bincount(place, reward) / np.maximum(np.bincount(place), 1))[place]
    total, within = (np.bincount(of_step, values**2, len(steps)) for values in (own, left))
    judged = (lengths >= _FEWEST_LENGTHS_IN_STEP) & (num > lengths) & (total > 1e-12 * np.maximum(num, 1))
    share = 1 - (within[judged] / (num - lengths)[judged]) / (total[judged] / (num - 1)[judged])
    return steps[judged], share
