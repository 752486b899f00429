"""What the sequences of a run say about its rewards: are they a matter of the response that they are handed to?

Shapes: N sequences, in the order of their recording.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..database import Database

_ROWS = """
SELECT s.step, hash(s.prompt_ids) AS prompt, hash(s.prompt_ids, s.response_ids) AS whole,
       hash(s.step, coalesce(s.group_id, hash(s.prompt_ids)::VARCHAR)) AS "group", s.reward,
       coalesce(s.advantage, list_avg(s.advantages)) AS advantage, s.num_response_tokens::DOUBLE AS length,
       list_avg(train.logprobs) AS likelihood
FROM (SELECT *, row_number() OVER () AS place FROM sequences) AS s
LEFT JOIN (SELECT step, seq_id, logprobs FROM scores WHERE "pass" = $scored AND iteration = 0) AS train
       USING (step, seq_id)
ORDER BY s.step, s.place
"""
_FARTHEST = 16
"""Rows by which rewards are looked for in a wrong place."""
_FEWEST = 30
"""Comparisons without which nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The sequences of a run."""

    step: np.ndarray
    """[N] int64"""
    prompt: np.ndarray
    """[N] a hash of the prompt's ids."""
    whole: np.ndarray
    """[N] a hash of the prompt's and the response's ids."""
    group: np.ndarray
    """[N] number of the group: sequences of one step with one group_id, or with one prompt where there is none."""
    reward: np.ndarray
    """[N] float64; NaN where not recorded."""
    advantage: np.ndarray
    length: np.ndarray
    likelihood: np.ndarray
    """[N] mean logprob of the response's tokens as the trainer scored them, nats."""

    def since(self, step: int) -> Rollouts:
        """The sequences from a step on."""
        return self._where(self.step >= step)

    def until(self, step: int) -> Rollouts:
        """The sequences up to a step."""
        return self._where(self.step <= step)

    def _where(self, kept: np.ndarray) -> Rollouts:
        return Rollouts(**{name: getattr(self, name)[kept] for name in self.__dataclass_fields__})


def read_rollouts(database: Database, scored: str = "train") -> Rollouts:
    """Read the sequences of the one run that is open; `scored` is the pass whose logprobs say how likely each was."""
    table = database.connection.sql(_ROWS, params={"scored": scored}).to_arrow_table()
    columns = {name: table[name].to_numpy() for name in table.column_names}
    columns["group"] = np.unique(columns["group"], return_inverse=True)[1]
    return Rollouts(**columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Responses that came twice: a reward that is a matter of the response is the same both times."""

    num_pairs: int
    unequal: float
    """Share of the pairs whose rewards differ; NaN without pairs."""
    shift: int
    """Rows by which rewards would have to move so that the fewest pairs differ; 0: they lie where they should."""
    unequal_shifted: float
    """The share of unequal pairs then."""
    mean_gap: float
    """Mean size of the difference of unequal pairs."""


def repeats(rollouts: Rollouts) -> Repeats:
    """Compare the rewards of equal responses to equal prompts, where they lie and moved by some rows within a step."""
    found = {shift: _unequal(rollouts, shift) for shift in range(-_FARTHEST, _FARTHEST + 1)}
    num, unequal, gap = found[0]
    best = min(found, key=lambda shift: (found[shift][1], abs(shift))) if num else 0
    return Repeats(num_pairs=num, unequal=unequal, shift=best, unequal_shifted=found[best][1], mean_gap=gap)


def _unequal(rollouts: Rollouts, shift: int) -> tuple[int, float, float]:
    """Neighbouring occurrences of the same response: how many, the share with unequal rewards, and by how much."""
    reward = rollouts.reward if shift == 0 else _moved(rollouts, shift)
    order = np.lexsort((rollouts.step, rollouts.whole))
    whole, reward = rollouts.whole[order], reward[order]
    same = (whole[1:] == whole[:-1]) & np.isfinite(reward[1:]) & np.isfinite(reward[:-1])
    count = int(same.sum())
    if count < _FEWEST:
        return 0, float("nan"), float("nan")
    gap = np.abs(reward[1:] - reward[:-1])[same]
    differs = gap > 1e-6 * max(1.0, float(np.nanmax(np.abs(reward))))
    return count, float(differs.mean()), float(gap[differs].mean()) if differs.any() else 0.0


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
    """Of the values less their group's mean; NaN where there is nothing to compare."""
    num: int
    negative_prompts: float
    """Share of the prompts with enough sequences whose own correlation is below -3 standard errors."""
    num_prompts: int


def relation(rollouts: Rollouts, first: str, second: str) -> Relation:
    """Correlate two columns within groups, over all and by prompt."""
    x, y = (_centred(getattr(rollouts, name), rollouts.group) for name in (first, second))
    known = np.isfinite(x) & np.isfinite(y) & ((x != 0) | (y != 0))
    x, y, prompt = x[known], y[known], rollouts.prompt[known]
    if len(x) < _FEWEST or not x.any() or not y.any():
        return Relation(correlation=float("nan"), num=len(x), negative_prompts=float("nan"), num_prompts=0)
    _, number = np.unique(prompt, return_inverse=True)
    xy, xx, yy, count = (np.bincount(number, weights) for weights in (x * y, x * x, y * y, np.ones_like(x)))
    enough = (count >= 12) & (xx > 0) & (yy > 0)
    own = xy[enough] / np.sqrt(xx[enough] * yy[enough])
    negative = own < -3 / np.sqrt(count[enough])
    return Relation(
        correlation=float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())),
        num=len(x),
        negative_prompts=float(negative.mean()) if enough.any() else float("nan"),
        num_prompts=int(enough.sum()),
    )


def agreement(rollouts: Rollouts, first: str, second: str) -> float:
    """Mean over groups of the correlation of two columns within each; NaN where too few groups have a spread.

    A baseline and a division by the group's spread leave the correlation of rewards and advantages at 1.
    """
    x, y = (_centred(getattr(rollouts, name), rollouts.group) for name in (first, second))
    known = np.isfinite(x) & np.isfinite(y)
    group = rollouts.group[known]
    xy, xx, yy = (np.bincount(group, product) for product in (x[known] * y[known], x[known] ** 2, y[known] ** 2))
    spread = (xx > 1e-12) & (yy > 1e-12)
    if spread.sum() < _FEWEST:
        return float("nan")
    return float((xy[spread] / np.sqrt(xx[spread] * yy[spread])).mean())


def _centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    total = np.bincount(group, np.where(known, values, 0.0))
    count = np.bincount(group, known.astype(float))
    centred: np.ndarray = values - (total / np.maximum(count, 1))[group]
    return centred
