"""Simulated training steps, as a loop would pass them to the recorder."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Step:
    """[B, T] arrays, padded on the right, as in a trainer; `mask` is true for tokens."""

    mask: np.ndarray
    ids: np.ndarray
    rollout: np.ndarray
    train: np.ndarray
    current: np.ndarray

    @cached_property
    def num_tokens(self):
        return int(self.mask.sum())

    @cached_property
    def tensors(self):
        """Return CPU tensors that share the arrays' memory."""
        import torch

        return {name: torch.from_numpy(getattr(self, name)) for name in ("mask", "ids", "rollout", "train", "current")}


def make_step(seed, *, num_sequences=1000, longest=1800):
    """Return a step of about a million tokens by default, with lengths from a ninth of the longest to the longest."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(longest // 9, longest, num_sequences)
    mask = np.arange(longest) < lengths[:, None]
    rollout = (-(draw.exponential(1.0, mask.shape) ** 2)).astype("f4")
    train, current = (np.minimum(rollout + draw.normal(0, 0.01, mask.shape), 0).astype("f4") for _ in range(2))
    return Step(
        mask=mask, ids=draw.integers(0, 150_000, mask.shape, "i4"), rollout=rollout, train=train, current=current
    )


def record(recorder, number, step, arrays=None, **more):
    """Record one step; `more` has further columns of its sequences."""
    arrays = arrays or step.__dict__
    batch = recorder.add_sequences(
        step=number, response_ids=arrays["ids"], response_attention_mask=arrays["mask"], **more
    )
    for name in ("rollout", "train", "current"):
        recorder.add_scores(name, batch, logprobs=arrays[name])
