"""Select the sequences to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ...schemas.errors import InvalidOption


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The sequences to import, by step and by a hash of their names."""

    steps: frozenset[int] | None = None
    """Steps to import; None if all steps are imported."""
    sample: float = 1.0
    """Share of sequences to import. The hash selects the same sequences in every import."""

    def keeps(self, steps: Sequence[int], seq_ids: Sequence[str]) -> np.ndarray:
        """Return [B] bool: True for each selected sequence, given the steps and names of B sequences."""
        kept = np.ones(len(seq_ids), bool)
        if self.steps is not None:
            kept &= np.isin(np.array(steps, np.int64), list(self.steps))
        if self.sample < 1.0:
            bound = int(self.sample * 2**64)
            hashes = (xxhash.xxh3_64_intdigest(name.encode(errors="replace")) for name in seq_ids)
            kept &= np.array([found < bound for found in hashes], bool)
        return kept


EVERYTHING = Selection()


def check_sample(share: float) -> float:
    """Return the share if it is in (0, 1]. Raises InvalidOption."""
    if not 0.0 < share <= 1.0:
        raise InvalidOption(
            f"got {share}; give a share of the sequences, above 0 and at most 1, for example 0.1", option="sample"
        )
    return share
