"""Per-step sums for a triangulation, over the tokens scored by the trainer, the engine and a replay.

With t, r and f the logprobs from trainer, engine and replay: e_t = t - f, e_r = r - f, d = t - r. A step's sums do not
depend on which process reads its tokens, and steps are added in order, so results are reproducible.

Shapes: N tokens in a step, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from ..schemas.passes import ROLLOUT, TRAIN
from .statistics.intervals import numbered

GAP, REMOVED = "gap", "removed"
"""Columns of `groups`: the sum of d^2, and the sum of d^2 - e_r^2, the part of d^2 removed if the replay replaces the trainer.
Columns TRAIN and
ROLLOUT are sums of e_t^2 - e_t e_r and e_r^2 - e_t e_r."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSums:
    """Sums over the error of the trainer or of the engine."""

    error: float
    abs_error: float
    square: float

    @classmethod
    def of(cls, error_N: np.ndarray) -> SideSums:
        return cls(
            error=float(error_N.sum()), abs_error=float(np.abs(error_N).sum()), square=float((error_N * error_N).sum())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSums:
    """Sums over the tokens in the given steps."""

    num_sequences: int
    num_tokens: int
    groups: dict[str, np.ndarray]
    """Column (see GAP) -> sums per group, [G]; groups are in order of first appearance."""
    sides: dict[str, SideSums]
    square_d: float
    spacing: float
    """Sum over tokens of the spacing between float32 values at the replay's logprob, nats."""

    @classmethod
    def of(cls, tokens: Mapping[str, np.ndarray]) -> ErrorSums:
        """Sum over the tokens in one step, which must have at least one token. Columns are those of the query in
        `triangulate`.
        """
        error_t, error_r = tokens["train"] - tokens["replayed"], tokens["rollout"] - tokens["replayed"]
        d = tokens["train"] - tokens["rollout"]
        squares = d * d, error_t * error_t, error_r * error_r
        common = error_t * error_r
        groups_N, _ = numbered(tokens["unit"])
        parts = {
            TRAIN: squares[1] - common,
            ROLLOUT: squares[2] - common,
            GAP: squares[0],
            REMOVED: squares[0] - squares[2],
        }
        return cls(
            num_sequences=1 + int((tokens["sequence"][1:] != tokens["sequence"][:-1]).sum()),
            num_tokens=len(d),
            groups={name: np.bincount(groups_N, part).astype(np.float64) for name, part in parts.items()},
            sides={TRAIN: SideSums.of(error_t), ROLLOUT: SideSums.of(error_r)},
            square_d=float(squares[0].sum()),
            spacing=float(np.abs(np.spacing(tokens["replayed"].astype(np.float32))).sum(dtype=np.float64)),
        )  # fmt: skip


def joined(parts: Sequence[ErrorSums]) -> ErrorSums:
    """Add the sums of one or more steps, in order."""
    names = parts[0].groups
    return ErrorSums(
        num_sequences=sum(part.num_sequences for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        groups={name: np.concatenate([part.groups[name] for part in parts]) for name in names},
        sides={name: _joined_side([part.sides[name] for part in parts]) for name in (TRAIN, ROLLOUT)},
        square_d=fsum(part.square_d for part in parts),
        spacing=fsum(part.spacing for part in parts),
    )


def _joined_side(parts: Sequence[SideSums]) -> SideSums:
    return SideSums(
        error=fsum(part.error for part in parts),
        abs_error=fsum(part.abs_error for part in parts),
        square=fsum(part.square for part in parts),
    )
