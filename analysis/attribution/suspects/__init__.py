"""One module per suspect: the evidence for and against it."""

from __future__ import annotations

from collections.abc import Callable

from ..run_facts import Facts
from ..suspect import Suspect
from .advantages import advantages
from .data import data
from .entropy import entropy
from .length import length
from .mismatch import mismatch
from .optimizer import optimizer
from .pairing import pairing
from .reference import reference
from .reward import reward
from .staleness import staleness
from .truncation import truncation

ALL: tuple[Callable[[Facts], Suspect], ...] = (
    mismatch, staleness, optimizer, reward, pairing, entropy, length, data, truncation, reference, advantages,
)  # fmt: skip

__all__ = ["ALL"]
