"""How far a replay has come, in units of work: tokens that go through the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..tracer.progress import Advance
from .recorded import RecordedRow

Told = Callable[[float], None]
"""Gets the shares of some work as they get done."""
FORWARD_TOKENS = 256
"""Tokens below which a forward takes as long as one of so many: it reads all weights in any case."""


def untold(share: float) -> None:
    """Tell nobody."""


class Meter:
    """Tells the work of one step of one arm, as its shares get done."""

    def __init__(self, advance: Advance, work: int):
        self._advance, self._work = advance, work
        self._done, self._told = 0.0, 0

    def add(self, share: float) -> None:
        """A share of the work is done."""
        self._done = min(self._done + share, 1.0)
        units = int(self._done * self._work) - self._told
        if units:
            self._advance(units)
            self._told += units

    def finish(self) -> None:
        """All of it is done."""
        self.add(1.0)


def work(batches: Sequence[Sequence[RecordedRow]], cached_tokens: int | None) -> int:
    """The work of forwards of these rows; `cached_tokens` at a time go through the KV cache, None for one forward."""
    total = 0
    for rows in batches:
        prompts, responses = (
            max(map(len, parts)) for parts in zip(*((r.prompt_ids, r.response_ids) for r in rows), strict=True)
        )
        if cached_tokens is None:
            total += _forward(len(rows) * (prompts + responses))
        else:
            total += _forward(len(rows) * prompts)
            total += -(-responses // cached_tokens) * _forward(len(rows) * cached_tokens)
    return total


def _forward(num_tokens: int) -> int:
    return max(num_tokens, FORWARD_TOKENS)
