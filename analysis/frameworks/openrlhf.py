from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption
from ..trace.macros import quoted, quoted_pair
from .framework import Framework, literals, option_field
from .notes import without_current

if TYPE_CHECKING:
    from ..trace.database import Database
    from ..trace.source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRlhf(Framework):
    policy_loss_type: str = option_field(
        "ppo", "Token-level or sequence-level ratios (default: ppo).", choices=("ppo", "gspo")
    )
    eps_clip_low_high: tuple[float, float] = option_field(
        (0.2, 0.2), "Clip ratios below 1 - E and above 1 + E (default: 0.2 0.2).", metavar="E E"
    )
    is_correction_enable: bool = option_field(False, "With gspo, divide by the rollout's probabilities.")

    name: ClassVar[str] = "openrlhf"
    version: ClassVar[str] = "0.11.0"
    source: ClassVar[str] = "openrlhf/models/loss.py, openrlhf/trainer/ray/ppo_actor.py"

    def check(self) -> None:
        if len(self.eps_clip_low_high) != 2 or not all(eps >= 0 for eps in self.eps_clip_low_high):
            raise InvalidOption(
                f"got {self.eps_clip_low_high}; pass two non-negative numbers", option="eps_clip_low_high"
            )

    def is_unlogged(self, column: str) -> bool:
        return column == "vllm_kl" and self.policy_loss_type == "gspo"

    def row_calls(self, pair: Pair) -> Iterable[str]:
        return (
            f"openrlhf_rows({quoted_pair(pair)})",
            f"openrlhf_updates({quoted(pair[0])})",
            f"openrlhf_clips({quoted_pair(pair)}, {literals(asdict(self).values())})",
        )

    def notes(self, database: Database, pair: Pair) -> list[str]:
        return without_current(database, pair, "OpenRLHF", "ppo_kl", "ppo_clip_ratio")


FRAMEWORK = OpenRlhf
