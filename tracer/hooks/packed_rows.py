"""Samples of packed rows, encoded as bytes.

The bytes are part of the trainer's batch, so they reach the process that trains on the row.

Shapes: R rows, one per process, L length of the longest encoded row in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """One of the samples packed into a row."""

    name: str
    group: str | None
    policy_version: int | None
    """Version of the weights that generated the sample; None if unknown."""
    advantage: float
    rewards: Mapping[str, float]
    """Reward function -> reward of this sample, and `reward` -> the trainer's weighted sum; may be empty."""
    ids: np.ndarray
    """[tokens] int32 ids of the prompt's and the response's tokens."""
    mask: np.ndarray
    """[tokens] uint8: 1 where the token counts in the loss."""

    @property
    def first(self) -> int:
        """Index of the first response token: the first token that counts in the loss."""
        counted = self.counted
        return int(counted[0]) if len(counted) else len(self.ids)

    @property
    def counted(self) -> np.ndarray:
        """Indices of the tokens with a term in the loss. Token 0 never has one, since no earlier token predicts it."""
        return np.flatnonzero(self.mask[1:]) + 1


@dataclass(frozen=True)
class PackedRow:
    """Samples of a packed row, in the loss's order. Shapes: S samples, T longest response, M terms in the loss."""

    samples: Sequence[PackedSample]

    @cached_property
    def lengths(self) -> np.ndarray:
        """[S] number of response tokens in each sample."""
        return np.array([len(sample.ids) - sample.first for sample in self.samples], np.int64)

    @cached_property
    def terms(self) -> tuple[np.ndarray, np.ndarray]:
        """For each term of the loss: [M] index of its sample, and [M] index of its token in the response."""
        counted = [sample.counted - sample.first for sample in self.samples]
        owners = np.repeat(np.arange(len(counted)), [len(places) for places in counted])
        return owners, np.concatenate([*counted, np.empty(0, np.int64)])

    @cached_property
    def scored(self) -> np.ndarray:
        """[S, T] bool: True for response tokens that have a term in the loss."""
        scored = np.zeros((len(self.samples), int(self.lengths.max(initial=0))), bool)
        scored[self.terms] = True
        return scored


def to_bytes(rows: Sequence[Sequence[PackedSample]]) -> Any:
    """Encode rows as a uint8 tensor [R, L]. Each row holds a line of JSON, then its samples' tokens and masks."""
    import torch

    encoded = [_encoded(samples) for samples in rows]
    width = max(map(len, encoded))
    return torch.from_numpy(np.stack([np.pad(row, (0, width - len(row))) for row in encoded]))


def of_bytes(row: Any) -> PackedRow:
    """Decode the samples of one row encoded by `to_bytes`."""
    data = row.cpu().numpy().tobytes()
    head, _, arrays = data.partition(b"\n")
    samples, place = [], 0
    for described in json.loads(head):
        length = described.pop("length")
        ids = np.frombuffer(arrays, "<i4", length, place)
        mask = np.frombuffer(arrays, np.uint8, length, place + ids.nbytes)
        place += ids.nbytes + mask.nbytes
        samples.append(PackedSample(**described, ids=ids, mask=mask))
    return PackedRow(samples)


def _encoded(samples: Sequence[PackedSample]) -> np.ndarray:
    described = [
        {
            "length": len(sample.ids),
            **{name: getattr(sample, name) for name in ("name", "group", "policy_version", "advantage")},
            "rewards": dict(sample.rewards),
        }
        for sample in samples
    ]
    arrays = [part for sample in samples for part in (sample.ids.astype("<i4"), sample.mask.astype(np.uint8))]
    return np.frombuffer(b"".join([json.dumps(described).encode(), b"\n", *(a.tobytes() for a in arrays)]), np.uint8)
