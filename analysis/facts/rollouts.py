"""The sequences of a run, with their rewards, advantages and mean logprobs.

Shapes: N sequences, in the order of their recording.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.passes import REFERENCE
from ..trace.columns import sequence_columns
from ..trace.database import Database, cached
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
FARTHEST = 16
"""Rows by which rewards are looked for in a wrong place."""
OPENING = 3
"""Tokens of a response that count as its opening."""
_ALONE = 0.5
"""Share of sequences without another one in their group from which steps are compared instead."""
FEWEST_COMPARED = 30
"""Comparisons below which there is no answer."""
FEWEST_SPANNING = 10
"""Responses on both sides of a step below which it is not looked at."""
CERTAIN_LOGPROB = 1e-3
"""Nats below which an opening is certain: of what is certain nothing moves."""


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
        """[N] uint64: a hash of the prompt, the response and the number of tokens that count in a mean logprob."""
        return hash_pair(self.whole, self.num_masked)

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
        one, two = successive(comparable(self, "reference"), self.step)
        moved = np.abs(self.reference[two] - self.reference[one])[(self.step[one] < step) & (self.step[two] >= step)]
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
        """The sequences at some places, in that order; or those selected by [N] bool."""
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


def comparable(rollouts: Rollouts, column: str) -> np.ndarray:
    """[N] hashes that are equal for responses whose values of a column can be compared; a mean logprob is over the tokens that count."""
    return rollouts.counted if column == "reference" else rollouts.whole


def least_reward(rollouts: Rollouts) -> float:
    """The least difference of two rewards that counts."""
    known = rollouts.reward[np.isfinite(rollouts.reward)]
    return max(1e-9, t.MATERIAL_REWARD * float(known.std())) if len(known) else math.inf


def successive(key: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[M] places of each pair of sequences that have the same key and follow one another, the earlier and the later one."""
    order = np.lexsort((step, key))
    again = np.flatnonzero(key[order][1:] == key[order][:-1])
    return order[:-1][again], order[1:][again]


def hash_pair(prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """[N] uint64: a number of each prompt with its response."""
    return prompt.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + response.astype(np.uint64)


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


def centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[N] values less the mean of the known ones of their group."""
    known = np.isfinite(values)
    total = np.bincount(group, np.where(known, values, 0.0))
    count = np.bincount(group, known.astype(float))
    centred: np.ndarray = values - (total / np.maximum(count, 1))[group]
    return centred
