"""NeMo-RL's numbers of the difference between the generation's logprobs and the policy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption
from ...schemas.passes import CURRENT
from ..trace.quoting import quoted_pair
from .framework import call, check_choice, literals, option_field, options_of, rows_of
from .notes import masked_out, null_without

if TYPE_CHECKING:
    import pyarrow as pa

    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair

TRUNCATIONS = ("tis", "icepop", "seq-mask-tis")


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoRl:
    """The options of NeMo-RL's clipped policy-gradient loss that decide these numbers."""

    reference_policy_kl_type: str = option_field("k3", "Estimator of the two KL errors (k3).", metavar="k1|k2|k3")
    """Estimator of gen_kl_error and policy_kl_error."""
    sequence_level_importance_ratios: bool = option_field(False, "Ratios of sequences.")
    """Ratios of sequences instead of tokens."""
    truncated_importance_sampling_type: str | None = option_field(
        None, "Truncation.", metavar="tis|icepop|seq-mask-tis"
    )
    """What becomes of ratios outside of the bounds; None: nothing."""
    truncated_importance_sampling_ratio: float | None = option_field(None, "Its upper bound.", metavar="C")
    """Upper bound."""
    truncated_importance_sampling_ratio_min: float | None = option_field(None, "Its lower bound.", metavar="C")
    """Lower bound; None: 0, which `tis` alone allows."""
    train_micro_batch_size: int = option_field(1, "Multiplies the mean of sequences' ratios (1).", metavar="N")
    """Sequences of a micro-batch; NeMo-RL's mean of sequences' ratios is that many times too large."""
    seq_logprob_error_threshold: float | None = option_field(None, "Mask sequences above it.", metavar="C")
    """Mask sequences whose mean of exp(|d|) is above it; None: none."""
    ratio_clip_min: float = option_field(0.2, "Ratios are at least 1 - E (0.2).", metavar="E")
    """The policy's ratio is clamped to 1 less this, at least."""
    ratio_clip_max: float = option_field(0.2, "Ratios are at most 1 + E (0.2).", metavar="E")
    """The policy's ratio is clamped to 1 plus this, at most."""
    disable_ppo_ratio: bool = option_field(False, "Logprobs in place of ratios.")
    """REINFORCE: what stands for the ratio is the logprob inside the loss."""

    name: ClassVar[str] = "nemo-rl"
    version: ClassVar[str] = "0.7.0"
    source: ClassVar[str] = "nemo_rl/algorithms/loss/loss_functions.py, nemo_rl/algorithms/grpo.py"

    def __post_init__(self) -> None:
        check_choice("nemo-rl", "reference_policy_kl_type", self.reference_policy_kl_type, ("k1", "k2", "k3"))
        if self.train_micro_batch_size < 1:
            raise InvalidOption(f"got {self.train_micro_batch_size}; it is 1 or more", option="train_micro_batch_size")
        kind = self.truncated_importance_sampling_type
        check_choice("nemo-rl", "truncated_importance_sampling_type", kind, TRUNCATIONS)
        lower, upper = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        if kind is None and (lower is not None or upper is not None):
            raise InvalidOption(
                f"truncated_importance_sampling_ratio needs truncated_importance_sampling_type: {', '.join(TRUNCATIONS)}"
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
                f"got {lower:g}; it is at most the ratio, {upper:g}", option="truncated_importance_sampling_ratio_min"
            )
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise InvalidOption("seq-mask-tis masks token ratios: leave sequence_level_importance_ratios away")
        if self.seq_logprob_error_threshold is not None and self._mixes_micro_batches:
            raise InvalidOption(
                "with it the mean of sequences' ratios depends on which sequences shared a "
                "micro-batch, which no trace tells; leave train_micro_batch_size away",
                option="seq_logprob_error_threshold",
            )
        for name in ("seq_logprob_error_threshold", "ratio_clip_min", "ratio_clip_max"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidOption(f"got {value:g}; give a number from 0 on", option=name)

    @property
    def _mixes_micro_batches(self) -> bool:
        return self.sequence_level_importance_ratios and self.train_micro_batch_size > 1

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        rows = database.ask(call("nemo_rl", pair, by, **options_of(self)))
        return rows if self.truncated_importance_sampling_type else rows.without({"is_oob_ratio"})

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        asked, kind = quoted_pair(pair), self.truncated_importance_sampling_type
        of_sequences, threshold = self.sequence_level_importance_ratios, self.seq_logprob_error_threshold
        lower, upper = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        rows = (self.reference_policy_kl_type, of_sequences, kind, upper, lower, threshold)
        ratios = (of_sequences, self.ratio_clip_min, self.ratio_clip_max, self.disable_ppo_ratio, threshold)
        calls = (
            f"nemo_rl_rows({asked}, {literals(rows)})",
            f"nemo_rl_entropies({asked}, {literals((threshold,))})",
            f"nemo_rl_ratios({asked}, {literals(ratios)})",
        )
        return rows_of(database, calls)

    def token_medians(self, pair: Pair) -> None:
        return None

    def notes(self, database: Database, pair: Pair) -> list[str]:
        ratios = ("probs_ratio", "probs_ratio_clamped")
        of_ratios = [f"{name}{end}" for name in ratios for end in ("", "_min", "_max")]
        return [
            *null_without(database, ("approx_entropy", *of_ratios), CURRENT),
            *masked_out(database, (*pair, CURRENT), "NeMo-RL", rejects=self.seq_logprob_error_threshold is not None),
        ]


FRAMEWORK = NemoRl
