"""Shapes: N sequences in recording order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.passes import REFERENCE
from ..statement import Measured
from ..trace.columns import sequence_columns
from ..trace.database import Database, cached
from ..trace.ragged import array_of, centred
from ..trace.source import Pair
from . import thresholds as t

_ROWS = """
SELECT s.step, prompt, whole, "group", reward, s.advantage, s.first_advantage, length, num_masked,
       coalesce(scored.mean, sampled.mean) AS likelihood, sampled.mean AS sampled, reference.mean AS reference,
       s.opening, ending, goes_on, is_ended, scored.opening AS opening_trained, sampled.opening AS opening_sampled,
       reference.opening AS opening_reference
FROM (
    SELECT *, row_number() OVER () AS place
    FROM (
        SELECT step, seq_id, hash(prompt_ids) AS prompt, hash(prompt_ids, response_ids) AS whole,
               hash(prompt_ids, response_ids[1:$opening]) AS opening, coalesce(response_ids[-1], -1) AS ending,
               list_contains(response_ids[:-2], $end) AS goes_on, coalesce(response_ids[-1] = $end, false) AS is_ended,
               hash(step, coalesce(group_id, hash(prompt_ids)::VARCHAR)) AS "group", reward,
               coalesce(advantage, list_avg(advantages)) AS advantage,
               coalesce(advantage, advantages[1]) AS first_advantage,
               {masked}::DOUBLE AS num_masked, num_response_tokens - num_masked AS length
        FROM sequences
    )
) AS s
{passes}
ORDER BY s.step, s.place
"""
_PROMPTS = "SELECT DISTINCT hash(prompt_ids) AS prompt FROM sequences WHERE len(prompt_ids) > 0"
_END = """
FROM (
    SELECT response_ids[-1] AS ending, num_response_tokens AS length FROM sequences
    WHERE step <= (SELECT min(step) + (max(step) - min(step)) / 5 FROM sequences)
)
SELECT ending, count(*) AS n WHERE length < (SELECT max(num_response_tokens) FROM sequences)
GROUP BY ending ORDER BY n DESC, ending
"""
_PASS = """
LEFT JOIN (
    SELECT step, seq_id, {mean} AS mean, list_avg(logprobs[1:$opening]) AS opening
    FROM scores{masks} WHERE "pass" = ${name} AND iteration = 0
) AS {name} USING (step, seq_id)
"""
"""To save memory, each list of logprobs is reduced to means before the joins and the sort."""
_OF_ALL = {"mean": "list_avg(logprobs)", "masks": "", "masked": "0"}
_OF_COUNTED = {
    "mean": "CASE WHEN response_mask IS NULL THEN list_avg(logprobs) "
    "ELSE list_avg(list_filter(logprobs, lambda logprob, place: response_mask[place])) END",
    "masked": "coalesce(num_response_tokens - list_sum(response_mask::TINYINT[]), 0)",
    "masks": " JOIN (SELECT step, seq_id, response_mask FROM sequences) USING (step, seq_id)",
}
"""SQL for means over the tokens in the loss mask only, because the policy did not choose the others."""
FARTHEST = 16
OPENING = 3
_ALONE = 0.5
_MOST = 0.9
"""Minimum share of responses that end with the end token, among uncut responses in the first fifth of the run."""
FEWEST_COMPARED, FEWEST_SPANNING = 30, 10
"""Minimum number of pairs in a comparison, and of responses on each side of a step."""
CERTAIN_LOGPROB = 1e-3
"""Prefixes with -logprob below this (nats) are skipped, because new weights barely change such logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Arrays with one value per sequence [N]. Values that were not recorded are NaN."""

    step: np.ndarray
    prompt: np.ndarray
    whole: np.ndarray
    """`prompt` and `whole` (prompt and response together) are hashes of token ids."""
    group: np.ndarray
    """Group index. If most groups have a single member, each step is one group."""
    reward: np.ndarray
    advantage: np.ndarray
    first_advantage: np.ndarray
    length: np.ndarray
    num_masked: np.ndarray
    likelihood: np.ndarray
    """Mean trainer logprob (nats) over the loss mask, or the mean engine logprob if the trainer's is not recorded."""
    sampled: np.ndarray
    reference: np.ndarray
    ending: np.ndarray
    goes_on: np.ndarray
    """Whether the end token (see _MOST) also occurs before the last token."""
    is_ended: np.ndarray
    """Whether the last token is the end token (see _MOST)."""
    opening: np.ndarray
    """Hash of the prompt and the first OPENING response tokens. Openings repeat more often than whole responses."""
    opening_trained: np.ndarray
    opening_sampled: np.ndarray
    opening_reference: np.ndarray

    @property
    def num_tokens(self) -> np.ndarray:
        """Number of response tokens, including those outside the loss mask. Length limits apply to this number."""
        return np.asarray(self.length + self.num_masked)

    @property
    def reward_size(self) -> np.ndarray:
        return np.asarray(np.abs(centred(self.reward, self.group)))

    @property
    def advantage_size(self) -> np.ndarray:
        return np.asarray(np.abs(self.advantage))

    @property
    def is_alone(self) -> bool:
        return len(np.unique(self.group)) == len(np.unique(self.step))

    def by_step(self, values: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps, and the mean of the finite `values` [N] at each step. Rows with weight 0 are left out."""
        weights = np.ones(len(values)) if weights is None else weights
        known = np.isfinite(values) & (weights > 0)
        steps, place = np.unique(self.step[known], return_inverse=True)
        total, weight = (np.bincount(place, each) for each in (values[known] * weights[known], weights[known]))
        return steps, total / np.maximum(weight, 1e-300)

    def since(self, step: int) -> Rollouts:
        return self.ordered(self.step >= step)

    def until(self, step: float) -> Rollouts:
        return self.ordered(self.step <= step)

    def at_step(self, step: int) -> Rollouts:
        first, last = np.searchsorted(self.step, [step, step + 1])
        return self.ordered(slice(first, last))

    def ordered(self, places: np.ndarray | slice) -> Rollouts:
        return Rollouts(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})

    def at(self, steps: Sequence[int]) -> Rollouts:
        return self.ordered(np.isin(self.step, steps))


@cached
def read_rollouts(database: Database, pair: Pair = ("train", "rollout")) -> Rollouts:
    parameters = {"scored": pair[0], "sampled": pair[1], "reference": REFERENCE, "opening": OPENING}
    with database.following("reading sequences"):
        endings = database.connection.execute(_END).fetchnumpy()
        is_usual = len(endings["n"]) > 0 and endings["n"][0] >= _MOST * endings["n"].sum()
        parameters["end"] = int(endings["ending"][0]) if is_usual else -1
        columns = _OF_COUNTED if sequence_columns(database).mask else _OF_ALL
        passes = "".join(_PASS.format(name=name, **columns) for name in ("scored", "sampled", "reference"))
        rows = _ROWS.format(passes=passes, masked=columns["masked"])
        table = database.connection.sql(rows, params=parameters).to_arrow_table()
    arrays = {name: array_of(table[name]) for name in table.column_names}
    arrays["group"] = _groups(arrays["group"], arrays["step"])
    return Rollouts(**arrays)


def read_prompts(database: Database) -> set[int]:
    """Return the hashes of the recorded prompts' token ids."""
    with database.following("reading prompts"):
        return set(database.connection.execute(_PROMPTS).fetchnumpy()["prompt"].tolist())


def _groups(group: np.ndarray, step: np.ndarray) -> np.ndarray:
    _, number, count = np.unique(group, return_inverse=True, return_counts=True)
    alone = (count[number] == 1).mean() if len(number) else 0.0
    groups: np.ndarray = np.unique(step, return_inverse=True)[1] if alone > _ALONE else number
    return groups


def _keyed(hashes: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Combine each hash with a number into a new hash, [N]."""
    return np.asarray(hashes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + number.astype(np.uint64))


def comparable(rollouts: Rollouts, column: str) -> np.ndarray:
    """Return a hash for each sequence. Two sequences with equal hashes should have equal values in `column`.

    For mean reference logprobs, the hash includes the number of masked tokens, because the mean leaves them out.
    """
    if column == "opening_reference":
        return rollouts.opening
    return _keyed(rollouts.whole, rollouts.num_masked) if column == "reference" else rollouts.whole


def least_reward(rollouts: Rollouts) -> float:
    known = rollouts.reward[np.isfinite(rollouts.reward)]
    return max(1e-9, t.MATERIAL_REWARD * float(known.std())) if len(known) else math.inf


def successive(key: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((step, key))
    again = np.flatnonzero(key[order][1:] == key[order][:-1])
    return order[:-1][again], order[1:][again]


def value_differences(
    first: np.ndarray, second: np.ndarray, scale: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """Return [N] differences of rewards or advantages (NaN if one is missing), and whether each exceeds the rounding error.

    The rounding error is 1e-6 times the largest absolute value `scale`, but at least 1e-6.
    """
    difference = first - second
    return difference, np.abs(difference) > 1e-6 * np.fmax(scale, 1.0)


def other_endings(rollouts: Rollouts, before: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps, and for each step the share of responses that end early with an unusual last token.

    A response ends early if it has fewer tokens than the longest one in `before`. A last token is unusual if it ends
    fewer than 1% of the responses in `before`.
    """
    tokens, counts = np.unique(before.ending, return_counts=True)
    usual = tokens[counts >= 0.01 * len(before.ending)]
    is_other = ~np.isin(rollouts.ending, usual) & (rollouts.num_tokens < before.num_tokens.max())
    steps, place = np.unique(rollouts.step, return_inverse=True)
    return steps, np.bincount(place, is_other) / np.bincount(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedResponses:
    """Differences between rewards of identical responses. A deterministic reward function would give none."""

    num_pairs: int
    unequal: float
    mean_difference: float
    order: str
    """Description of the reordering with the fewest unequal pairs. Empty if the recorded order is best."""
    unequal_ordered: float

    @property
    def lies_off(self) -> bool:
        return self.order != "" and self.unequal_ordered < t.UNEQUAL_SHIFTED * self.unequal


def repeated_responses(rollouts: Rollouts) -> RepeatedResponses:
    pairs, least = successive(rollouts.whole, rollouts.step), least_reward(rollouts)
    num, unequal, mean_difference = _unequal(rollouts.reward, pairs, least)
    shares = {"": unequal}
    if unequal > 0:
        shares |= {text: _unequal(rollouts.reward[rows], pairs, least)[1] for text, rows in _orders(rollouts)}
    order = min(shares, key=shares.__getitem__)
    return RepeatedResponses(
        num_pairs=num, unequal=unequal, mean_difference=mean_difference, order=order, unequal_ordered=shares[order]
    )


def _orders(rollouts: Rollouts) -> Iterator[tuple[str, np.ndarray]]:
    """Yield reorderings of the rewards, each of which undoes a known bug: a phrase that can follow "with", and for each
    row the index of the row whose reward it gets, [N]."""
    step, group, row = rollouts.step, rollouts.group, np.arange(len(rollouts.step))
    first, end = np.searchsorted(step, step), np.searchsorted(step, step, side="right")
    size, place = end - first, row - first
    for by in sorted(range(-FARTHEST, FARTHEST + 1), key=abs)[1:]:
        yield f"rewards shifted by {by} rows within the step", first + (place + by) % size
    members = np.bincount(first, group == group[first]).astype(np.int64)[first]
    groups, begins = size // members, first + place // members * members
    is_regular = (np.bincount(first, (size % members > 0) | (group != group[begins])) == 0)[first]
    by_group = np.where(is_regular, first + place % groups * members + place // groups, row)
    by_member = np.where(is_regular, first + place % members * groups + place // members, row)
    yield "rewards read member by member rather than group by group (rows and columns swapped)", by_group
    yield "rewards read group by group rather than member by member (rows and columns swapped)", by_member
    yield "rewards of neighbouring rows swapped in pairs", first + np.minimum(place ^ 1, size - 1)
    yield "rewards in reverse order within the step", end - 1 - place
    yield "rewards in reverse order within each group", np.lexsort((-row, group, step))
    by_length, by_length_in_group = np.lexsort((rollouts.length, step)), np.lexsort((rollouts.length, group, step))
    yield "rewards assigned in completion order (shortest response first)", np.argsort(by_length)
    yield "rewards assigned in completion order within each group", np.argsort(by_length_in_group)
    is_like_next = (end < len(row)) & (size[end % len(row)] == size)
    yield "rewards taken from the next step (recorded one step late)", np.where(is_like_next, row + size, row)


def _unequal(reward: np.ndarray, pairs: tuple[np.ndarray, np.ndarray], least: float) -> tuple[int, float, float]:
    one, two = pairs
    difference = np.abs(reward[two] - reward[one])
    difference = difference[np.isfinite(difference)]
    if len(difference) < FEWEST_COMPARED:
        return 0, math.nan, math.nan
    differs = difference > least
    return len(difference), float(differs.mean()), float(difference[differs].mean()) if differs.any() else 0.0


def distribution_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance between the finite values of two samples."""
    a, b = np.sort(a[np.isfinite(a)]), np.sort(b[np.isfinite(b)])
    at = np.concatenate([a, b])
    return float(np.abs(np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)).max())


_KEPT_STEPS, _FEWEST_KEPT = 8, 3


def moved_rewards(rollouts: Rollouts, step: int) -> dict[str, Measured] | None:
    """Return the mean rewards before and after a step if the reward distribution stays the same, else None.

    If rewards are assigned to the wrong responses, their distribution does not change.
    """
    of_rows, of_steps = [], []
    sides = rollouts.until(step - 1).since(step - _KEPT_STEPS), rollouts.since(step).until(step + _KEPT_STEPS - 1)
    for part in sides:
        steps, means = part.by_step(part.reward)
        of_rows.append(part.reward[np.isfinite(part.reward)])
        of_steps.append(means)
        if len(steps) < _FEWEST_KEPT:
            return None
    error = max(math.sqrt(sum(float(means.var(ddof=1)) / len(means) for means in of_steps)), 1e-12)
    before, after = (float(means.mean()) for means in of_steps)
    most = max(t.SAME_REWARDS_SD * error, t.SAME_REWARDS * float(np.concatenate(of_rows).std()))
    is_same = abs(after - before) <= most and distribution_distance(*of_rows) <= t.SAME_REWARDS + 1e-9
    return {"step": step, "mean_before": before, "mean": after} if is_same else None


def unequal_in_step(rollouts: Rollouts) -> tuple[float, float]:
    """Return how often identical sequences have different rewards: the share of pairs within a group, and across groups
    of a step. A share is NaN if there are too few pairs."""
    least = least_reward(rollouts)
    of_group = _unequal(rollouts.reward, successive(_keyed(rollouts.whole, rollouts.group), rollouts.step), least)[1]
    one, two = successive(_keyed(rollouts.whole, rollouts.step), rollouts.group)
    apart = rollouts.group[one] != rollouts.group[two]
    return of_group, _unequal(rollouts.reward, (one[apart], two[apart]), least)[1]
