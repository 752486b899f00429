"""OpenRLHF's numbers of the difference between vLLM's logprobs and the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption
from ...schemas.passes import CURRENT
from ..trace.quoting import quoted, quoted_pair
from .framework import call, check_choice, literals, option_field, options_of, rows_of
from .notes import masked_out, null_without

if TYPE_CHECKING:
    import pyarrow as pa

    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRlhf:
    """The options of OpenRLHF's policy loss that decide its ratio and clip."""

    policy_loss_type: str = option_field("ppo", "Ratios of tokens or of sequences (ppo).", metavar="ppo|gspo")
    """Ratios of tokens (`ppo`), or the geometric mean of a sequence's (`gspo`)."""
    eps_clip_low_high: tuple[float, float] = option_field(
        (0.2, 0.2), "Ratios are clipped to 1 - E and 1 + E (0.2 0.2).", metavar="E E"
    )
    """The ratio is clipped to 1 less the first and 1 plus the second."""
    is_correction_enable: bool = option_field(False, "Ratios of gspo to the rollout.")
    """With gspo: ratios to the rollout's logprobs instead of the trainer's old ones."""

    name: ClassVar[str] = "openrlhf"
    version: ClassVar[str] = "0.11.0"
    source: ClassVar[str] = "openrlhf/models/loss.py, openrlhf/trainer/ray/ppo_actor.py"

    def __post_init__(self) -> None:
        check_choice("openrlhf", "policy_loss_type", self.policy_loss_type, ("ppo", "gspo"))
        if len(self.eps_clip_low_high) != 2 or not all(eps >= 0 for eps in self.eps_clip_low_high):
            raise InvalidOption(f"got {self.eps_clip_low_high}; give two numbers from 0 on", option="eps_clip_low_high")

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        rows = database.ask(call("openrlhf", pair, by, **options_of(self)))
        return rows.without({"vllm_kl"}) if self.policy_loss_type == "gspo" else rows

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        options = (self.policy_loss_type, self.eps_clip_low_high, self.is_correction_enable)
        calls = (
            f"openrlhf_rows({quoted_pair(pair)})",
            f"openrlhf_updates({quoted(pair[0])})",
            f"openrlhf_clips({quoted_pair(pair)}, {literals(options)})",
        )
        return rows_of(database, calls)

    def token_medians(self, pair: Pair) -> None:
        return None

    def notes(self, database: Database, pair: Pair) -> list[str]:
        return [
            *null_without(database, ("ppo_kl", "ppo_clip_ratio"), CURRENT),
            *masked_out(database, (*pair, CURRENT), "OpenRLHF"),
        ]


FRAMEWORK = OpenRlhf
