"""slime's numbers of the difference between the engine's logprobs and the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...schemas.errors import InvalidOption
from ..database import Database
from ..rows import Rows
from ..source import Pair
from .framework import call, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Slime:
    """The options of slime's truncated importance sampling, and of its means."""

    tis_clip: float = 2.0
    """Upper bound of a token's ratio."""
    tis_clip_low: float = 0.0
    """Lower bound of a token's ratio."""
    calculate_per_token_loss: bool = False
    """Means over tokens instead of over each sequence's mean."""

    name: ClassVar[str] = "slime"
    version: ClassVar[str] = "0.3.1"
    source: ClassVar[str] = "slime/backends/megatron_utils/loss.py, cp_utils.py"

    def __post_init__(self) -> None:
        if not 0 <= self.tis_clip_low <= self.tis_clip:
            raise InvalidOption(
                f"tis_clip_low: got {self.tis_clip_low:g}; it lies between 0 and tis_clip, {self.tis_clip:g}"
            )

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        return database.ask(call("slime", pair, by, **options_of(self)))

    def notes(self) -> list[str]:
        return []
