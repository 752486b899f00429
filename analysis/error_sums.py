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
class ErrorSums:
    """Sums over the tokens in the given steps."""

    groups: dict[str, np.ndarray]
    """Column (see GAP) -> sums per group, [G]; groups are in order of first appearance."""
    totals: dict[str, float]
    """Name -> sum: num_sequences, num_tokens; square_d; spacing, that of float32 values at the replay's logprob, nats; and for
    TRAIN and ROLLOUT e, |e| and e^2 as `train error`, `train abs_error` and `train square`."""

    @classmethod
    def of(cls, tokens: Mapping[str, np.ndarray]) -> ErrorSums:
        """Sum over the tokens in one step, at least one; columns are those of the query in `_tokens`."""
        errors = {TRAIN: tokens["train"] - tokens["replayed"], ROLLOUT: tokens["rollout"] - tokens["replayed"]}
        d = tokens["train"] - tokens["rollout"]
        squares = {side: error_N * error_N for side, error_N in errors.items()}
        common, square_d = errors[TRAIN] * errors[ROLLOUT], d * d
        parts = {side: square_N - common for side, square_N in squares.items()}
        parts |= {GAP: square_d, REMOVED: square_d - squares[ROLLOUT]}
        groups_N, _ = numbered(tokens["unit"])
        totals = {
            "num_sequences": 1 + int((tokens["sequence"][1:] != tokens["sequence"][:-1]).sum()),
            "num_tokens": len(d),
            "square_d": float(square_d.sum()),
            "spacing": float(np.abs(np.spacing(tokens["replayed"].astype(np.float32))).sum(dtype=np.float64)),
        }
        for side, error_N in errors.items():
            sums = {"error": error_N, "abs_error": np.abs(error_N), "square": squares[side]}
            totals |= {f"{side} {name}": float(values_N.sum()) for name, values_N in sums.items()}
        groups = {name: np.bincount(groups_N, part).astype(np.float64) for name, part in parts.items()}
        return cls(groups=groups, totals=totals)


def joined(parts: Sequence[ErrorSums]) -> ErrorSums:
    """Add the sums of one or more steps, in order."""
    return ErrorSums(
        groups={name: np.concatenate([part.groups[name] for part in parts]) for name in parts[0].groups},
        totals={name: fsum(part.totals[name] for part in parts) for name in parts[0].totals},
    )
