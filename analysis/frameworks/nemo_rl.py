from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption
from ...schemas.passes import CURRENT
from ..trace.macros import quoted_pair
from .framework import Framework, literals, option_field
from .notes import masked_out, null_without

if TYPE_CHECKING:
    from ..trace.database import Database
    from ..trace.source import Pair

TRUNCATIONS = ("tis", "icepop", "seq-mask-tis")


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoRl(Framework):
    reference_policy_kl_type: str = option_field(
        "k3", "Estimator for gen_kl_error and policy_kl_error (k3).", choices=("k1", "k2", "k3")
    )
    sequence_level_importance_ratios: bool = option_field(False, "Use sequence-level ratios.")
    truncated_importance_sampling_type: str | None = option_field(None, "How to truncate ratios.", choices=TRUNCATIONS)
    truncated_importance_sampling_ratio: float | None = option_field(None, "Upper bound for ratios.", metavar="C")
    truncated_importance_sampling_ratio_min: float | None = option_field(None, "Lower bound for ratios.", metavar="C")
    """None means 0, but `icepop` and `seq-mask-tis` require a value."""
    train_micro_batch_size: int = option_field(
        1, "Sequences per micro-batch; mean sequence ratios are multiplied by N (1).", metavar="N", at_least=1
    )
    seq_logprob_error_threshold: float | None = option_field(
        None, "Mask sequences with mean exp(|d|) above C.", metavar="C", at_least=0
    )
    ratio_clip_min: float = option_field(0.2, "Clamp ratios below 1 - E (0.2).", metavar="E", at_least=0)
    ratio_clip_max: float = option_field(0.2, "Clamp ratios above 1 + E (0.2).", metavar="E", at_least=0)
    disable_ppo_ratio: bool = option_field(False, "Use logprobs instead of ratios (REINFORCE).")

    name: ClassVar[str] = "nemo-rl"
    version: ClassVar[str] = "0.7.0"
    source: ClassVar[str] = "nemo_rl/algorithms/loss/loss_functions.py, nemo_rl/algorithms/grpo.py"

    def check(self) -> None:
        kind = self.truncated_importance_sampling_type
        lower, upper = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        if kind is None and (lower is not None or upper is not None):
            raise InvalidOption(
                "truncated_importance_sampling_ratio needs truncated_importance_sampling_type: "
                f"one of {', '.join(TRUNCATIONS)}"
            )
        if kind is not None and (upper is None or upper <= 0):
            raise InvalidOption(
                f"truncated_importance_sampling_type {kind} needs truncated_importance_sampling_ratio above 0"
            )
        if kind in ("icepop", "seq-mask-tis") and lower is None:
            raise InvalidOption(
                f"truncated_importance_sampling_type {kind} needs truncated_importance_sampling_ratio_min"
            )
        if lower is not None and upper is not None and lower > upper:
            raise InvalidOption(
                f"got {lower:g}; it must not exceed the upper bound, {upper:g}",
                option="truncated_importance_sampling_ratio_min",
            )
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise InvalidOption("seq-mask-tis uses token ratios; drop sequence_level_importance_ratios")
        mixes_micro_batches = self.sequence_level_importance_ratios and self.train_micro_batch_size > 1
        if self.seq_logprob_error_threshold is not None and mixes_micro_batches:
            raise InvalidOption(
                "with this option, the mean sequence ratio depends on how sequences were grouped into "
                "micro-batches, and the grouping is not recorded; drop train_micro_batch_size",
                option="seq_logprob_error_threshold",
            )

    def is_unlogged(self, column: str) -> bool:
        return column == "is_oob_ratio" and self.truncated_importance_sampling_type is None

    def row_calls(self, pair: Pair) -> Iterable[str]:
        asked, kind = quoted_pair(pair), self.truncated_importance_sampling_type
        of_sequences, threshold = self.sequence_level_importance_ratios, self.seq_logprob_error_threshold
        lower, upper = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        rows = (self.reference_policy_kl_type, of_sequences, kind, upper, lower, threshold)
        ratios = (of_sequences, self.ratio_clip_min, self.ratio_clip_max, self.disable_ppo_ratio, threshold)
        return (
            f"nemo_rl_rows({asked}, {literals(rows)})",
            f"nemo_rl_entropies({asked}, {literals((threshold,))})",
            f"nemo_rl_ratios({asked}, {literals(ratios)})",
        )

    def notes(self, database: Database, pair: Pair) -> list[str]:
        ratios = ("probs_ratio", "probs_ratio_clamped")
        of_ratios = [f"{name}{end}" for name in ratios for end in ("", "_min", "_max")]
        return [
            *null_without(database, ("approx_entropy", *of_ratios), CURRENT),
            *masked_out(database, (*pair, CURRENT), "NeMo-RL", rejects=self.seq_logprob_error_threshold is not None),
        ]


FRAMEWORK = NemoRl
