"""Steps that are scored together: an arm with a bound of tokens a forward fills its forwards from several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from .loaded import LoadedModel
from .meter import Told
from .recorded import RecordedRow
from .scored import Scored
from .scorers import Scorer

FORWARDS = 16
"""Forwards of the largest bound after which no further step joins: what is held in memory, and lost when a replay is killed."""

Rows = dict[int, list[RecordedRow]]
"""Step -> its rows."""


def joined_steps(
    steps: Iterable[tuple[int, list[RecordedRow]]], most: int, num_tokens: Callable[[int, list[RecordedRow]], int]
) -> Iterator[Rows]:
    """Runs of steps that one arm or several score together, up to `most` tokens; with 0 each step is alone.

    Joined are steps whose rows are of one policy version and attempt, and whose sequences have names of their own.
    """
    joined: Rows = {}
    tokens, names, key = 0, set[str](), None
    for step, rows in steps:
        found, own = {(row.policy_version, row.attempt) for row in rows}, {row.seq_id for row in rows}
        if joined and (tokens >= most or len(found) > 1 or found != key or not names.isdisjoint(own)):
            yield joined
            joined, tokens, names = {}, 0, set()
        joined[step], key = rows, found
        tokens, names = tokens + num_tokens(step, rows), names | own
    if joined:
        yield joined


class JoinedScoring:
    """Scores the steps of one run of them, each when it is asked for, or all of them with the first."""

    def __init__(self, loaded: LoadedModel, steps: Sequence[int]):
        self._loaded, self._steps = loaded, steps
        self._scored: dict[tuple[str, int], Scored] = {}

    def score(
        self,
        scorer: Scorer,
        step: int,
        rows: list[RecordedRow],
        of_step: Callable[[int], list[RecordedRow]],
        told: Callable[[int], Told],
    ) -> Scored:
        """What an arm gives rows of a step.

        `of_step` gives the rows that it will ask for of a later one; `told`, of a number of tokens, gets the shares of these.
        """
        name = scorer.arm.name
        if (name, step) in self._scored:
            return self._scored.pop((name, step))
        parts = {step: rows}
        if scorer.arm.batch_tokens is not None and not scorer.capture.dense:
            parts |= {later: of_step(later) for later in self._steps if later > step}
        together = [row for part in parts.values() for row in part]
        whole = self._loaded.score(scorer, together, told(sum(row.num_tokens for row in together)))
        if len(together) == len(rows):
            return whole
        self._scored |= {(name, number): whole.only({row.seq_id for row in part}) for number, part in parts.items()}
        return self._scored.pop((name, step))
