"""One training step of a scene, as it is recorded.

Shapes: B sequences, P prompt tokens, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Act:
    """One step as it is recorded: padded batches, all on the response's tokens."""

    index: int
    version: int
    prompts: Tensor
    """[B, P]"""
    ids: Tensor
    """[B, T]"""
    lengths: Tensor
    """[B]"""
    counted: Tensor
    """[B, T] bool: counts in the loss."""
    rollout: Tensor
    """[B, T] float32 nats"""
    train: Tensor
    """[B, T] float32 nats"""
    entropy: Tensor
    """[B, T] float32 nats, of the train pass."""
    clean_rollout: Tensor
    """[B, T] what the engine would have said without the fault."""
    clean_train: Tensor
    affected: Tensor
    """[B, T] bool: tokens that the fault reaches."""
    groups: list[str]
    rewards: np.ndarray
    """[B]"""
    advantages: np.ndarray
    """[B]"""
    carried: np.ndarray
    """[B] bool: sequences that carry the fault."""
    rollout_known: Tensor
    """[B, T] bool: the engine gave a value."""
    train_known: Tensor
    tool: Tensor
    """[B, T] bool: written by a tool."""
    flipped: Tensor
    """[B, T] bool: some router chose otherwise than without the fault."""
    disagreeing: Tensor
    """[B, T] bool: some router of the trainer chose otherwise than the engine's."""

    @property
    def tokens(self) -> Tensor:
        """[B, T] bool: there is a token."""
        return torch.arange(self.ids.shape[1])[None] < self.lengths[:, None]
