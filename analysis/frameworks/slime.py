from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption
from ..trace.macros import quoted, quoted_pair
from .framework import Framework, literals, option_field
from .notes import without_current

if TYPE_CHECKING:
    from ..trace.database import Database
    from ..trace.source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Slime(Framework):
    """Options for slime's truncated importance sampling and loss averaging."""

    tis_clip: float = option_field(2.0, "Upper bound for token ratios (default: 2.0).", metavar="C")
    tis_clip_low: float = option_field(0.0, "Lower bound for token ratios (default: 0).", metavar="C")
    calculate_per_token_loss: bool = option_field(False, "Average over tokens.")

    name: ClassVar[str] = "slime"
    version: ClassVar[str] = "0.3.1"
    source: ClassVar[str] = (
        "slime/backends/megatron_utils/loss.py, cp_utils.py, examples/train_infer_mismatch_helper/mis.py"
    )

    def check(self) -> None:
        if not 0 <= self.tis_clip_low <= self.tis_clip:
            raise InvalidOption(
                f"got {self.tis_clip_low:g}; it must be between 0 and tis_clip ({self.tis_clip:g})",
                option="tis_clip_low",
            )

    def row_calls(self, pair: Pair) -> Iterable[str]:
        clips = literals((self.tis_clip, self.tis_clip_low))
        return f"slime_rows({quoted_pair(pair)}, {clips})", f"slime_updates({quoted(pair[0])})"

    def notes(self, database: Database, pair: Pair) -> list[str]:
        return without_current(database, pair, "slime", "ppo_kl", "ois")


FRAMEWORK = Slime
