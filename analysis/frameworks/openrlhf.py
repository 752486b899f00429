"""OpenRLHF's numbers of the difference between vLLM's logprobs and the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..database import Database
from ..rows import Rows
from ..source import Pair
from .framework import call


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRlhf:
    """OpenRLHF: no option decides these numbers."""

    name: ClassVar[str] = "openrlhf"
    version: ClassVar[str] = "0.11.0"
    source: ClassVar[str] = "openrlhf/models/loss.py, openrlhf/trainer/ray/ppo_actor.py"

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        return database.ask(call("openrlhf", pair, by))

    def notes(self) -> list[str]:
        return []
