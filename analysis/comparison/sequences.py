"""Compare the sequences in two runs: prompts, responses, logprobs of equal tokens, rewards, advantages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..facts.rollouts import Rollouts, reward_differences
from ..facts.two_runs import Pairs, paired, read_prefixes
from ..trace.database import Database
from ..trace.tokens import step_ranges, tokens_by_step
from .comparison import RunDifference


def sequence_differences(a: Rollouts, b: Rollouts, steps: Sequence[int]) -> Iterator[RunDifference]:
    """Yield the differences in prompts, responses, rewards and advantages at the steps in both runs."""
    pairs = paired(a, b)
    yield from _prompts(a, b, steps)
    yield from _responses(a, pairs)
    one, two = (run.reward[at] for run, at in ((a, pairs.a), (b, pairs.b)))
    _, differs = reward_differences(one, two, b.reward)
    yield from _first("rewards", a.step[pairs.a], one, two, pairs.equal & differs, pairs.equal & np.isfinite(one - two))
    gain_a, gain_b = a.advantage[pairs.a], b.advantage[pairs.b]
    gap = np.abs(gain_a - gain_b)
    known = np.isfinite(gap) & _in_equal_groups(a, b, pairs, differs)
    beyond = gap > 1e-6 * np.maximum(1.0, np.abs(gain_b))
    yield from _first("advantages", a.step[pairs.a], gain_a, gain_b, known & beyond, known)


def _prompts(a: Rollouts, b: Rollouts, steps: Sequence[int]) -> Iterator[RunDifference]:
    of_a, of_b = ({step: run.prompts_of(step) for step in steps} for run in (a, b))
    others = [step for step in steps if not np.array_equal(of_a[step], of_b[step])]
    if others:
        first = others[0]
        num = [len(np.unique(of_run[first])) for of_run in (of_a, of_b)]
        values = {"share": len(others) / len(steps), "num_steps": len(others)}
        yield RunDifference(
            kind="prompts", name="", step=first, a=f"{num[0]} prompts", b=f"{num[1]} prompts",
            values=values | {"num_shared": len(np.intersect1d(of_a[first], of_b[first]))},
        )  # fmt: skip


def _responses(a: Rollouts, pairs: Pairs) -> Iterator[RunDifference]:
    others = ~pairs.equal
    if others.any():
        steps = a.step[pairs.a]
        first = int(steps[others].min())
        at_first = steps == first
        equal = f"{int((pairs.equal & at_first).sum())} of {int(at_first.sum())} equal"
        values = {"share": float(others.mean()), "num_pairs": len(others)}
        yield RunDifference(kind="responses", name="", step=first, a=equal, b=equal, values=values)


def _in_equal_groups(a: Rollouts, b: Rollouts, pairs: Pairs, differs: np.ndarray) -> np.ndarray:
    """Return [K] bool: True for pairs in whose group every sequence, in both runs, has a partner with an equal response
    and reward."""
    fine = pairs.equal & ~differs
    inside = np.ones(len(fine), bool)
    for run, at in ((a, pairs.a), (b, pairs.b)):
        sound = np.zeros(len(run.step), bool)
        sound[at[fine]] = True
        inside &= ~np.isin(run.group[at], run.group[~sound])
    return inside


def _first(
    kind: str, step_K: np.ndarray, a_K: np.ndarray, b_K: np.ndarray, differs_K: np.ndarray, known_K: np.ndarray
) -> Iterator[RunDifference]:
    if differs_K.any():
        place = int(np.flatnonzero(differs_K)[np.argmin(step_K[differs_K])])
        values = {
            "share": float(differs_K.sum() / known_K.sum()), "num_pairs": int(known_K.sum()),
            "largest": float(np.abs(a_K - b_K)[differs_K].max()),
        }  # fmt: skip
        yield RunDifference(
            kind=kind, name="", step=int(step_K[place]), a=float(a_K[place]), b=float(b_K[place]), values=values
        )


@dataclass(slots=True)
class _PassDifference:
    """Differences between the two runs' logprobs in one pass, accumulated step by step."""

    step: int | None = None
    a: float = 0.0
    b: float = 0.0
    num_tokens: int = 0
    num_unequal: int = 0
    largest: float = 0.0
    largest_step: int = 0

    def add(self, step_K: np.ndarray, num_K: np.ndarray, a_T: np.ndarray, b_T: np.ndarray) -> None:
        """Compare the tokens of more sequence pairs bitwise and add their differences."""
        a_T, b_T = a_T.astype(np.float32), b_T.astype(np.float32)
        unequal = np.flatnonzero(a_T.view(np.int32) != b_T.view(np.int32))
        self.num_tokens += len(a_T)
        self.num_unequal += len(unequal)
        if not len(unequal):
            return
        step_T = step_K[np.searchsorted(np.cumsum(num_K), unequal, side="right")]
        if self.step is None:
            self.step, self.a, self.b = int(step_T[0]), float(a_T[unequal[0]]), float(b_T[unequal[0]])
        size = np.abs(a_T[unequal].astype(np.float64) - b_T[unequal])
        size[~np.isfinite(size)] = 0.0
        place = int(size.argmax())
        if size[place] > self.largest:
            self.largest, self.largest_step = float(size[place]), int(step_T[place])


def logprob_differences(
    a: Database, b: Database, steps: Sequence[int], passes: Sequence[str]
) -> Iterator[RunDifference]:
    """Yield the first and largest logprob difference per pass, over the tokens before two responses to the same prompt
    diverge."""
    found = {name: _PassDifference() for name in passes}
    tokens, wanted = tokens_by_step(a), set(steps)
    for chunk in step_ranges({step: num for step, num in tokens.items() if step in wanted}):
        prefixes = read_prefixes(a, b, chunk, passes)
        for name, of_pass in found.items():
            of_pass.add(prefixes.a.step, *prefixes.logprobs(name))
    for name, of_pass in found.items():
        if of_pass.step is not None:
            yield RunDifference(
                kind="logprobs", name=name, step=of_pass.step, a=of_pass.a, b=of_pass.b,
                values={
                    "share": of_pass.num_unequal / of_pass.num_tokens, "num_tokens": of_pass.num_tokens,
                    "largest": of_pass.largest, "largest_step": of_pass.largest_step,
                },
            )  # fmt: skip
