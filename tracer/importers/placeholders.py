"""Detect placeholders for missing logprobs.

Shapes: B sequences, R of them scored by a pass, N response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...schemas.passes import CURRENT, ROLLOUT, TRAIN
from ..ragged import Ragged, cells_of
from ..rows import ROUNDING_NATS

CLAMPED = -9999.0
POLICY = (ROLLOUT, TRAIN, CURRENT)
"""Passes that score the same policy. A token with probability 1 in one of them should have probability 1 in all."""
CERTAIN_NATS = ROUNDING_NATS["bfloat16"]
"""Largest |logprob| in nats (bfloat16 rounding error) at which a token counts as having probability 1."""

KEPT, HOLES, OPEN = 0, 1, 2
"""Verdicts on a list of zeros: logprobs, placeholders, or undecided until the import ends."""


@dataclass(slots=True, kw_only=True)
class Placeholders:
    clamped: int = 0
    masked_zeros: int = 0
    all_zero: int = 0
    """Number of zeros that became NULL because their list contains only zeros."""
    certain: int = 0
    """Number of zeros kept because another pass gives the token probability 1. Lists of a single zero do not count."""

    @property
    def total(self) -> int:
        return self.clamped + self.masked_zeros + self.all_zero

    def clean(self, logprobs: Ragged, mask: Ragged | None) -> Ragged:
        values = logprobs.values
        if not ((values == CLAMPED) | (values == 0.0)).any():
            return logprobs
        valid = logprobs.known.copy()
        clamped = valid & (values == CLAMPED)
        masked = valid & (values == 0.0) & (np.zeros(len(values), bool) if mask is None else ~mask.values)
        self.clamped += int(clamped.sum())
        self.masked_zeros += int(masked.sum())
        valid &= ~(clamped | masked)
        return logprobs if valid.all() else Ragged(values, logprobs.lengths, valid)


@dataclass(frozen=True, slots=True)
class PassRows:
    rows: np.ndarray
    """[R] int64 indices into the B sequences."""
    logprobs: Ragged


class ZeroLists:
    """Decides whether lists of zeros are placeholders or logprobs from a policy that gives every token probability 1.

    A list of zeros counts as logprobs if another pass over the same policy has values for the same tokens, all within
    CERTAIN_NATS of 0. Otherwise, a list of two or more zeros counts as a placeholder. A single zero is weak evidence,
    so it is kept, unless the whole pass was never filled in.

    If all of a pass's values in an import are 0.0, the pass was probably never filled in, and its values become NULL.
    They are kept only if other passes over the same policy have values too, all of them 0.0.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.filled: set[str] = set()

    def verdicts(self, passes: Mapping[str, PassRows], lengths: np.ndarray) -> dict[str, np.ndarray]:
        """Return each pass's verdicts, one per row: KEPT, HOLES or OPEN. `lengths` [B] are the response lengths."""
        zero_R = {name: _zero_lists(part.logprobs) for name, part in passes.items()}
        for name, part in passes.items():
            valid = part.logprobs.known
            if valid.any():
                self.seen.add(name)
            if (valid & (part.logprobs.values != 0.0)).any():
                self.filled.add(name)
        if not any(zeros.any() for zeros in zero_R.values()):
            return {name: np.full(len(part.rows), KEPT) for name, part in passes.items()}
        return self._judged(passes, lengths, zero_R)

    def _judged(
        self, passes: Mapping[str, PassRows], lengths: np.ndarray, zero_R: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        found = {name: np.full(len(part.rows), KEPT) for name, part in passes.items()}
        known, far = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for name, part in passes.items():
            cells, valid = cells_of(part.rows, lengths), part.logprobs.known
            known[name], far[name] = np.zeros((2, int(lengths.sum())), bool)
            known[name][cells] = valid
            far[name][cells] = valid & ~(np.abs(part.logprobs.values) <= CERTAIN_NATS)
        for name, part in passes.items():
            if zero_R[name].any():
                others = [other for other in POLICY if other != name and other in passes]
                witnesses = known[name] & np.any([known[other] for other in others], axis=0)
                doubts = known[name] & np.any([far[other] for other in others], axis=0)
                is_long_B = _sums(known[name], lengths) >= 2
                certain_B = (_sums(witnesses, lengths) > 0) & (_sums(doubts, lengths) == 0)
                found[name][zero_R[name]] = KEPT if name in self.filled else OPEN
                found[name][zero_R[name] & (is_long_B & ~certain_B)[part.rows]] = HOLES
        return found

    def was_never_filled(self, name: str) -> bool:
        others = {other for other in POLICY if other != name}
        return bool(others & self.filled) or not others & self.seen


def num_certain(logprobs: Ragged) -> int:
    zeros = _zero_lists(logprobs)
    if not zeros.any():
        return 0
    counts = _sums(logprobs.known, logprobs.lengths)
    return int(counts[zeros & (counts >= 2)].sum())


def as_holes(logprobs: Ragged) -> Ragged:
    return Ragged(logprobs.values, logprobs.lengths, np.zeros(len(logprobs.values), bool))


def _zero_lists(logprobs: Ragged) -> np.ndarray:
    known = logprobs.known
    is_zero = known & (logprobs.values == 0.0)
    if not is_zero.any():
        return np.zeros(len(logprobs), bool)
    counts = _sums(known, logprobs.lengths)
    return np.asarray((counts > 0) & (counts == _sums(is_zero, logprobs.lengths)))


def _sums(flags_N: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    counts, ends = np.concatenate([[0], np.cumsum(flags_N)]), np.cumsum(lengths)
    return np.asarray(counts[ends] - counts[ends - lengths])
