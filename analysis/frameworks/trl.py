"""TRL's numbers of the difference between vLLM's logprobs and the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...schemas.errors import InvalidOption
from ..database import Database
from ..rows import Rows
from ..source import Pair
from .framework import call, check_choice, options_of

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trl:
    """The options of TRL's importance-sampling correction."""

    vllm_importance_sampling_mode: str = "sequence_mask"
    """Ratios of tokens or of sequences; those outside of the bounds are cut to them, or become 0."""
    vllm_importance_sampling_clip_max: float = 3.0
    """Upper bound of a ratio; infinity for none."""
    vllm_importance_sampling_clip_min: float | None = None
    """Lower bound of a ratio; None: none."""

    name: ClassVar[str] = "trl"
    version: ClassVar[str] = "1.16.0"
    source: ClassVar[str] = "trl/trainer/grpo_trainer.py"

    def __post_init__(self) -> None:
        check_choice("trl", "vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, MODES)
        lower, upper = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if lower is not None and lower >= upper:
            raise InvalidOption(f"vllm_importance_sampling_clip_min: got {lower:g}; it lies below clip_max, {upper:g}")

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        return database.ask(call("trl", pair, by, **options_of(self)))

    def notes(self) -> list[str]:
        return []
