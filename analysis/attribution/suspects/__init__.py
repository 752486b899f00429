"""One file a suspect: what speaks for it and against it."""

from __future__ import annotations

from collections.abc import Callable

from ..attribution import Suspect
from ..facts import Facts
from .entropy import entropy
from .length import length
from .mismatch import mismatch
from .optimizer import optimizer
from .pairing import pairing
from .reward import reward
from .staleness import staleness

ALL: tuple[Callable[[Facts], Suspect], ...] = (mismatch, staleness, optimizer, reward, pairing, entropy, length)

__all__ = ["ALL"]
