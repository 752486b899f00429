"""Progress of a replay in units of work: tokens that go through the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..tracer.progress import Advance
from .recorded import RecordedRow

Told = Callable[[float], None]
"""Progress callback, called with each completed share of the work (0 to 1)."""
FORWARD_TOKENS = 256
"""Number of tokens below which a forward pass takes constant time, since reading the weights dominates."""


def untold(share: float) -> None:
    """Ignore progress."""


class Meter:
    """Converter from shares of one step's work to units of progress."""

    def __init__(self, advance: Advance, work: int):
        self._advance, self._work = advance, work
        self._done, self._told = 0.0, 0

    def add(self, share: float) -> None:
        """Add a completed share of the work."""
        self._done = min(self._done + share, 1.0)
        units = int(self._done * self._work) - self._told
        if units:
            self._advance(units)
            self._told += units

    def finish(self) -> None:
        """Report all remaining work as done."""
        self.add(1.0)


def work(batches: Sequence[Sequence[RecordedRow]], cached_tokens: int | None) -> int:
    """Return the work, in tokens, of forwards of these rows; `cached_tokens` per forward through the KV cache, None for one forward."""
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
