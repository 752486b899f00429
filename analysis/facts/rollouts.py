"""The sequences of a run, with their rewards, advantages and mean logprobs.

Shapes: N sequences, in recording order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.passes import REFERENCE
from ..statement import Measured
from ..trace.columns import sequence_columns
from ..trace.database import Database, cached
from ..trace.ragged import array_of
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
"""One row per sequence. Lists are reduced to numbers before they are joined and sorted, which saves memory."""
_OF_ALL = {"mean": "list_avg(logprobs)", "masks": "", "masked": "0"}
_OF_COUNTED = {
    "mean": "CASE WHEN response_mask IS NULL THEN list_avg(logprobs) "
    "ELSE list_avg(list_filter(logprobs, lambda logprob, place: response_mask[place])) END",
    "masked": "coalesce(num_response_tokens - list_sum(response_mask::TINYINT[]), 0)",
    "masks": " JOIN (SELECT step, seq_id, response_mask FROM sequences) USING (step, seq_id)",
}
"""SQL inserted into _ROWS. Tokens outside the loss mask are left out, because the policy did not choose them."""
FARTHEST = 16
"""Maximum shift, in rows, tested for misplaced rewards."""
OPENING = 3
"""Number of response tokens in an opening: the prompt with these tokens is the prefix compared between responses."""
_ALONE = 0.5
"""Share of sequences alone in their group above which each step counts as one group."""
FEWEST_COMPARED = 30
"""Minimum number of sequences or groups for a comparison."""
FEWEST_SPANNING = 10
"""Minimum number of responses sampled both before and after a step."""
CERTAIN_LOGPROB = 1e-3
"""-logprob, in nats, below which the policy counts as certain of a prefix; such prefixes do not show a weight
change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The sequences of a run."""

    step: np.ndarray
    """[N] int64"""
    prompt: np.ndarray
    """[N] hash of the prompt's token ids."""
    response: np.ndarray
    """[N] hash of the response's token ids."""
    whole: np.ndarray
    """[N] hash of prompt and response ids."""
    group: np.ndarray
    """[N] group index. A group is the sequences of a step with one group_id, or with one prompt if group_id was not
    recorded; if most groups have one member, each step is a group."""
    reward: np.ndarray
    """[N] float64; NaN where not recorded."""
    advantage: np.ndarray
    """[N] advantage of the response, or the mean over its tokens if recorded per token; NaN where not recorded."""
    first_advantage: np.ndarray
    """[N] advantage of the first token if recorded per token, else of the response."""
    length: np.ndarray
    """[N] number of response tokens in the loss mask."""
    num_masked: np.ndarray
    """[N] number of response tokens outside the loss mask, such as tool output."""
    likelihood: np.ndarray
    """[N] mean trainer logprob over response tokens in the loss mask, nats; the engine's mean where the trainer has no
    logprobs.
    """
    sampled: np.ndarray
    """[N] mean engine logprob over response tokens in the loss mask, nats; NaN where not recorded."""
    reference: np.ndarray
    """[N] mean logprob under the reference model over response tokens in the loss mask, nats; NaN where not recorded."""
    ending: np.ndarray
    """[N] id of the last response token; -1 for empty responses."""
    opening: np.ndarray
    """[N] hash of the prompt ids and the first OPENING response ids, which repeat more often than whole responses."""
    opening_trained: np.ndarray
    """[N] mean trainer logprob of the opening, nats; NaN where not recorded."""
    opening_sampled: np.ndarray
    """[N] mean engine logprob of the opening, nats; NaN where not recorded."""

    @property
    def num_tokens(self) -> np.ndarray:
        """[N] number of response tokens, masked or not, as a length limit counts them."""
        return np.asarray(self.length + self.num_masked)

    @property
    def counted(self) -> np.ndarray:
        """[N] uint64 hash of prompt, response and number of masked tokens."""
        return self.whole.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self.num_masked.astype(np.uint64)

    @property
    def reward_size(self) -> np.ndarray:
        """[N] |reward - mean reward of the group|."""
        return np.asarray(np.abs(centred(self.reward, self.group)))

    @property
    def advantage_size(self) -> np.ndarray:
        """[N] |advantage|."""
        return np.asarray(np.abs(self.advantage))

    @property
    def is_alone(self) -> bool:
        """True if each step counts as one group."""
        return len(np.unique(self.group)) == len(np.unique(self.step))

    def by_step(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the n steps with a known value, and the mean of each step's [N] values."""
        known = np.isfinite(values)
        steps, place = np.unique(self.step[known], return_inverse=True)
        return steps, np.bincount(place, values[known]) / np.maximum(np.bincount(place), 1)

    def prompts_of(self, step: int) -> np.ndarray:
        """Return the sorted prompt hashes of a step."""
        first, last = np.searchsorted(self.step, [step, step + 1])
        return np.sort(self.prompt[first:last])

    def since(self, step: int) -> Rollouts:
        """Return the sequences of a step and all later steps."""
        return self.ordered(self.step >= step)

    def until(self, step: int) -> Rollouts:
        """Return the sequences of a step and all earlier steps."""
        return self.ordered(self.step <= step)

    def at_step(self, step: int) -> Rollouts:
        """Return the sequences of a step, in recording order."""
        first, last = np.searchsorted(self.step, [step, step + 1])
        return self.ordered(slice(first, last))

    def ordered(self, places: np.ndarray | slice) -> Rollouts:
        """Return the sequences at the given indices, in that order, or those selected by a mask, [N] bool."""
        return Rollouts(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})

    def at(self, steps: Sequence[int]) -> Rollouts:
        """Return the sequences at the given steps."""
        return self.ordered(np.isin(self.step, steps))


@cached
def read_rollouts(database: Database, pair: Pair = ("train", "rollout")) -> Rollouts:
    """Read the sequences of the open run, with trainer and engine logprobs from the passes of `pair`."""
    parameters = {"scored": pair[0], "sampled": pair[1], "reference": REFERENCE, "opening": OPENING}
    with database.following("reading sequences"):
        rows = _ROWS.format(**(_OF_COUNTED if sequence_columns(database).mask else _OF_ALL))
        table = database.connection.sql(rows, params=parameters).to_arrow_table()
    columns = {name: array_of(table[name]) for name in table.column_names}
    columns["group"] = _groups(columns["group"], columns["step"])
    return Rollouts(**columns)


def _groups(group: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return [N] group indices; step indices if most sequences are alone in their group."""
    _, number, count = np.unique(group, return_inverse=True, return_counts=True)
    alone = (count[number] == 1).mean() if len(number) else 0.0
    groups: np.ndarray = np.unique(step, return_inverse=True)[1] if alone > _ALONE else number
    return groups


def comparable(rollouts: Rollouts, column: str) -> np.ndarray:
    """Return [N] hashes that are equal for responses with comparable values in a column.

    Mean logprobs are comparable only between responses with identical loss masks.
    """
    return rollouts.counted if column == "reference" else rollouts.whole


def least_reward(rollouts: Rollouts) -> float:
    """Return the smallest difference between two rewards that counts."""
    known = rollouts.reward[np.isfinite(rollouts.reward)]
    return max(1e-9, t.MATERIAL_REWARD * float(known.std())) if len(known) else math.inf


def successive(key: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of M pairs of consecutive sequences with equal keys, return the indices of the earlier and the later one."""
    order = np.lexsort((step, key))
    again = np.flatnonzero(key[order][1:] == key[order][:-1])
    return order[:-1][again], order[1:][again]


def reward_differences(first: np.ndarray, second: np.ndarray, scale_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [N] reward differences of identical responses (NaN if unknown), and whether each exceeds rounding.

    `scale_of`: rewards whose largest absolute value determines the size of rounding errors.
    """
    difference = first - second
    scale = float(np.fmax.reduce(np.abs(scale_of), initial=1.0))
    return difference, np.abs(difference) > 1e-6 * scale


def shared_responses(run: Rollouts, control: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each run, the [M] indices of the first occurrence of each prompt and response that both runs sampled."""
    _, at_a, at_b = np.intersect1d(run.whole, control.whole, return_indices=True)
    return at_a, at_b


def centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return [N] values minus the mean of their group's known values."""
    known = np.isfinite(values)
    total = np.bincount(group, np.where(known, values, 0.0))
    count = np.bincount(group, known.astype(float))
    centred: np.ndarray = values - (total / np.maximum(count, 1))[group]
    return centred


def other_endings(rollouts: Rollouts, before: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Return n steps, and the share of responses at each that end early with a token that rarely ended a response before."""
    tokens, counts = np.unique(before.ending, return_counts=True)
    usual = tokens[counts >= 0.01 * len(before.ending)]
    is_other = ~np.isin(rollouts.ending, usual) & (rollouts.num_tokens < before.num_tokens.max())
    steps, place = np.unique(rollouts.step, return_inverse=True)
    return steps, np.bincount(place, is_other) / np.bincount(place)


ORDERS = {
    "members_first": "the first members of all groups before all second members, as if rows and columns were swapped",
    "groups_first": "rewards read group by group instead of member by member, as if rows and columns were swapped",
    "shortest_first": "rewards in the order in which responses of these lengths finish",
    "shortest_first_in_groups": "rewards in the order in which the responses of a group finish",
    "last_step": "the rewards of the next step, as if they were recorded one step late",
}
"""How each row order that a bug may produce is undone, in words that follow "with"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedResponses:
    """Rewards of responses sampled twice; a deterministic reward is the same both times."""

    num_pairs: int
    unequal: float
    """Share of pairs with different rewards; NaN if there are no pairs."""
    mean_difference: float
    """Mean absolute difference over the pairs with different rewards."""
    order: str
    """Row order of the rewards that leaves the fewest pairs with different rewards, in words; empty if it is the
    recorded order."""
    unequal_ordered: float
    """Share of pairs with different rewards in that order."""

    @property
    def lies_off(self) -> bool:
        """True if another row order leaves far fewer pairs with different rewards."""
        return self.order != "" and self.unequal_ordered < t.UNEQUAL_SHIFTED * self.unequal


def repeated_responses(rollouts: Rollouts) -> RepeatedResponses:
    """Compare the rewards of repeated responses to a prompt, as recorded and in other row orders of the step."""
    pairs, least = successive(rollouts.whole, rollouts.step), least_reward(rollouts)
    num, unequal, mean_difference = _unequal(rollouts.reward, pairs, least)
    shares = {"": unequal}
    if unequal > 0:
        for by in sorted(range(-FARTHEST, FARTHEST + 1), key=abs)[1:]:
            text = f"rewards shifted by {by} rows within the step"
            shares[text] = _unequal(_moved(rollouts, by), pairs, least)[1]
        for name, text in ORDERS.items():
            shares[text] = _unequal(rollouts.reward[_ordered(rollouts, name)], pairs, least)[1]
    order = min(shares, key=shares.__getitem__)
    return RepeatedResponses(
        num_pairs=num, unequal=unequal, mean_difference=mean_difference, order=order, unequal_ordered=shares[order]
    )


def _ordered(rollouts: Rollouts, name: str) -> np.ndarray:
    """Return, for each of N rows, the index of the row whose reward it takes in the named order. If groups differ in
    size, rows keep their own rewards.
    """
    firsts = np.flatnonzero(np.r_[True, rollouts.step[1:] != rollouts.step[:-1]])
    lasts = np.r_[firsts[1:], len(rollouts.step)]
    place = np.arange(len(rollouts.step))
    if name == "last_step":
        for first, last, end in zip(firsts, lasts, lasts[1:], strict=False):
            if last - first == end - last:  # the rewards of this step were recorded with the next one
                place[first:last] = np.arange(last, end)
        return place
    for first, last in zip(firsts, lasts, strict=True):
        rows, group, length = place[first:last].copy(), rollouts.group[first:last], rollouts.length[first:last]
        size = int((group == group[0]).sum())
        if name.startswith("shortest_first"):
            keys = (length, group) if name.endswith("groups") else (length,)
            place[rows[np.lexsort(keys)]] = rows
        elif len(rows) % size == 0 and (np.diff(group.reshape(-1, size)) == 0).all():
            by_group = rows.reshape(-1, size) if name == "members_first" else rows.reshape(size, -1)
            place[first:last] = by_group.T.reshape(-1)
    return place


def _unequal(reward: np.ndarray, pairs: tuple[np.ndarray, np.ndarray], least: float) -> tuple[int, float, float]:
    """Return the number of pairs with known rewards, the share that differs by more than `least`, and the mean
    difference of those that do.
    """
    one, two = pairs
    difference = np.abs(reward[two] - reward[one])
    difference = difference[np.isfinite(difference)]
    if len(difference) < FEWEST_COMPARED:
        return 0, math.nan, math.nan
    differs = difference > least
    return len(difference), float(differs.mean()), float(difference[differs].mean()) if differs.any() else 0.0


def _moved(rollouts: Rollouts, shift: int) -> np.ndarray:
    """Return [N] rewards moved by `shift` rows within each step, wrapping around."""
    firsts = np.flatnonzero(np.r_[True, rollouts.step[1:] != rollouts.step[:-1]])
    sizes = np.diff(np.r_[firsts, len(rollouts.step)])
    first, size = np.repeat(firsts, sizes), np.repeat(sizes, sizes)
    moved: np.ndarray = rollouts.reward[first + (np.arange(len(first)) - first + shift) % size]
    return moved


_KEPT_STEPS, _FEWEST_KEPT = 8, 3
"""Maximum and minimum number of steps compared before and after a step. Over so few steps, the policy hardly changes."""


def moved_rewards(rollouts: Rollouts, step: int) -> dict[str, Measured] | None:
    """Return the mean rewards before and after a step if all rewards together have the same distribution on both sides.

    Rewards that changed then belong to other rows. None if the distributions differ or there are fewer than three steps
    on either side.
    """
    of_rows, of_steps = [], []
    for part in (
        rollouts.until(step - 1).since(step - _KEPT_STEPS),
        rollouts.since(step).until(step + _KEPT_STEPS - 1),
    ):
        known = np.isfinite(part.reward)
        steps, place = np.unique(part.step[known], return_inverse=True)
        of_rows.append(part.reward[known])
        of_steps.append(np.bincount(place, part.reward[known]) / np.maximum(np.bincount(place), 1))
        if len(steps) < _FEWEST_KEPT:
            return None
    from scipy.stats import ks_2samp  # importing it takes half a second

    error = max(math.sqrt(sum(float(means.var(ddof=1)) / len(means) for means in of_steps)), 1e-12)
    before, after = (float(means.mean()) for means in of_steps)
    are_near = abs(after - before) <= max(
        t.SAME_REWARDS_SD * error, t.SAME_REWARDS * float(np.concatenate(of_rows).std())
    )
    is_same = are_near and ks_2samp(*of_rows).statistic <= t.SAME_REWARDS
    return {"step": step, "mean_before": before, "mean": after} if is_same else None


def unequal_share(rollouts: Rollouts, column: str, least: float) -> float:
    """Return the share of repeated responses whose values differ by more than `least`; NaN with fewer than 30 pairs."""
    return _unequal(getattr(rollouts, column), successive(comparable(rollouts, column), rollouts.step), least)[1]
