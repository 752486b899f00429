"""One recorded training step of a trace with a planted fault.

Shapes: B sequences, P prompt tokens, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """One recorded training step: padded batches, aligned with the response tokens."""

    index: int
    version: int
    prompts: Tensor
    """[B, P]"""
    ids: Tensor
    """[B, T]"""
    lengths: Tensor
    """[B]"""
    counted: Tensor
    """[B, T] bool: the token counts in the loss."""
    rollout: Tensor
    """[B, T] float32 nats"""
    train: Tensor
    """[B, T] float32 nats"""
    entropy: Tensor
    """[B, T] float32 nats, of the train pass."""
    clean_rollout: Tensor
    """[B, T] float32 nats, of the engine without the fault."""
    clean_train: Tensor
    """[B, T] float32 nats, of the trainer without the fault."""
    affected: Tensor
    """[B, T] bool: the fault changes the token's record."""
    groups: list[str]
    rewards: np.ndarray
    """[B]"""
    advantages: np.ndarray
    """[B]"""
    carried: np.ndarray
    """[B] bool: the sequence has the fault."""
    rollout_known: Tensor
    """[B, T] bool: the engine's logprob is recorded."""
    train_known: Tensor
    """[B, T] bool: the trainer's logprob is recorded."""
    tool: Tensor
    """[B, T] bool: a tool wrote the token."""
    flipped: Tensor
    """[B, T] bool: some router chose other experts than without the fault."""
    disagreeing: Tensor
    """[B, T] bool: some router of the trainer chose other experts than the engine's."""

    @property
    def tokens(self) -> Tensor:
        """[B, T] bool: the position holds a token, not padding."""
        return torch.arange(self.ids.shape[1])[None] < self.lengths[:, None]
