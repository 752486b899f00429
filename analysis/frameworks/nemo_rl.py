from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..trace.macros import quoted
from .framework import Framework, literals, option_field
from .notes import without_current

if TYPE_CHECKING:
    from ..trace.database import Database
    from ..trace.source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoRl(Framework):
    reference_policy_kl_type: str = option_field(
        "k3", "Estimator for gen_kl_error and policy_kl_error (default: k3).", choices=("k1", "k2", "k3")
    )
    sequence_level_importance_ratios: bool = option_field(False, "Use sequence-level ratios.")
    train_micro_batch_size: int = option_field(
        1, "Sequences per micro-batch; mean sequence ratios are multiplied by N (default: 1).", metavar="N", at_least=1
    )
    ratio_clip_min: float = option_field(0.2, "Clamp ratios below 1 - E (default: 0.2).", metavar="E", at_least=0)
    ratio_clip_max: float = option_field(0.2, "Clamp ratios above 1 + E (default: 0.2).", metavar="E", at_least=0)
    disable_ppo_ratio: bool = option_field(False, "Use logprobs instead of ratios (REINFORCE).")

    name: ClassVar[str] = "nemo-rl"
    version: ClassVar[str] = "0.7.0"
    source: ClassVar[str] = "nemo_rl/algorithms/loss/loss_functions.py, nemo_rl/algorithms/grpo.py"

    def row_calls(self, pair: Pair) -> Iterable[str]:
        a, b = map(quoted, pair)
        of_sequences = self.sequence_level_importance_ratios
        rows = (self.reference_policy_kl_type, of_sequences)
        ratios = (of_sequences, self.ratio_clip_min, self.ratio_clip_max, self.disable_ppo_ratio)
        return (
            f"nemo_rl_rows({a}, {b}, {literals(rows)})",
            f"nemo_rl_entropies({b})",
            f"nemo_rl_ratios({a}, {literals(ratios)})",
        )

    def notes(self, database: Database, pair: Pair) -> list[str]:
        ratios = ("probs_ratio", "probs_ratio_clamped")
        of_ratios = [f"{name}{end}" for name in ratios for end in ("", "_min", "_max")]
        return without_current(database, pair, "NeMo-RL", "approx_entropy", *of_ratios)


FRAMEWORK = NemoRl
