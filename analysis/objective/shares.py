"""What the loss multiplies each token's term of a sequence by, within its update: see Loss.aggregation.

Shapes: R sequences and inner iterations that went through the loss, whether their logprobs can be compared or not; U updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.loss import Loss
from ..statistics.estimators import Array

TOKEN_MEANS = ("token_mean", "batch_token_mean", "micro_token_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRows:
    """[R] arrays, of all that the loss's forward was recorded for: its divisors count them all."""

    update_R: np.ndarray
    """Number of the update."""
    num_tokens_R: np.ndarray
    """Tokens that count in the loss, by the mask alone."""
    micro_batch_R: np.ndarray
    """A number for each micro-batch; 0 where it was not recorded."""

    @property
    def num_rows_U(self) -> np.ndarray:
        """Sequences of each update."""
        return np.bincount(self.update_R)


def shares(loss: Loss, rows: LossRows) -> Array:
    """[R] what the loss multiplies each token's term by; of aggregation `sequence`, each sequence's one term.

    Of an update whose micro-batches were not all recorded, the tokens are one batch.
    """
    update_R = rows.update_R
    if loss.aggregation in TOKEN_MEANS:
        tokens_U = np.bincount(update_R, rows.num_tokens_R)
        divisor_R = np.maximum(tokens_U, 1)[update_R]
        if loss.aggregation == "micro_token_mean":
            divisor_R = np.where(knows_micro_batches(rows)[update_R], _of_micro_batches(rows), divisor_R)
    else:
        divisor_R = rows.num_rows_U[update_R].astype(np.float64)
    if loss.aggregation == "sequence_mean":
        divisor_R = divisor_R * np.maximum(rows.num_tokens_R, 1)
    elif loss.aggregation == "constant":
        divisor_R = divisor_R * (loss.max_tokens or 1)
    return np.asarray(1 / divisor_R, np.float64)


def knows_micro_batches(rows: LossRows) -> np.ndarray:
    """[U] bool: whether the micro-batch of every row was recorded."""
    return np.asarray(np.bincount(rows.update_R, rows.micro_batch_R == 0) == 0)


def _of_micro_batches(rows: LossRows) -> Array:
    """[R] tokens of the row's micro-batch, times the micro-batches of its update."""
    keys = np.stack([rows.update_R.astype(np.uint64), rows.micro_batch_R.astype(np.uint64)])
    (update_M, _), micro_R = np.unique(keys, axis=1, return_inverse=True)
    micro_R = micro_R.reshape(-1)
    tokens_M = np.maximum(np.bincount(micro_R, rows.num_tokens_R), 1)
    num_U = np.bincount(update_M.astype(np.int64), minlength=int(rows.update_R.max(initial=-1)) + 1)
    return np.asarray(tokens_M[micro_R] * num_U[rows.update_R])
