from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption, NothingToCompare, option
from ...schemas.passes import CURRENT, ROLLOUT
from ..trace.macros import quoted, quoted_pair
from .framework import Framework, literals, option_field
from .notes import masked_out, null_without, set_otherwise

if TYPE_CHECKING:
    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair

CLIPPING = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
"""Loss types that clip ratios on both sides."""

_SAMPLING, _CLIPS, _CISPO = "sampling/", "clip_ratio/", "cispo_clip_ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trl(Framework):
    vllm_importance_sampling_mode: str = option_field(
        "sequence_mask",
        "One of token_truncate, token_mask, sequence_truncate, sequence_mask (the default).",
        metavar="MODE",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    vllm_importance_sampling_clip_max: float = option_field(3.0, "Upper bound for ratios (default: 3.0).", metavar="C")
    """Infinity disables the bound."""
    vllm_importance_sampling_clip_min: float | None = option_field(None, "Lower bound for ratios.", metavar="C")
    trainer: str = option_field("grpo", "Trainer whose loss is used (default: grpo).", choices=("grpo", "rloo"))
    loss_type: str = option_field(
        "dapo", "Loss type, as named by TRL: dapo (the default), cispo, ...", metavar="TYPE",
        choices=(*CLIPPING, "cispo", "sapo", "vespo"),
    )  # fmt: skip
    importance_sampling_level: str = option_field(
        "token", "Compute the loss's ratios per token or per sequence (default: token).", choices=("token", "sequence")
    )
    epsilon: float = option_field(0.2, "Clip ratios below 1 - E (default: 0.2).", metavar="E", at_least=0)
    epsilon_high: float | None = option_field(
        None, "Clip ratios above 1 + E, or for cispo above E (default: epsilon).", metavar="E", at_least=0
    )
    delta: float | None = option_field(None, "Maximum ratio in the loss.", metavar="C", at_least=0)
    logging_steps: int | None = option_field(
        None, "Print means over N steps, as TRL logs them.", metavar="N", at_least=1
    )
    logging_first_step: bool = option_field(False, "Log the first step separately.")

    name: ClassVar[str] = "trl"
    version: ClassVar[str] = "1.16.0"
    source: ClassVar[str] = "trl/trainer/grpo_trainer.py, rloo_trainer.py"

    def check(self) -> None:
        lower, upper = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if lower is not None and lower >= upper:
            raise InvalidOption(
                f"got {lower:g}; it must be below clip_max ({upper:g})", option="vllm_importance_sampling_clip_min"
            )
        if self.logging_first_step and self.logging_steps is None:
            raise InvalidOption("logging_first_step needs logging_steps")
        if self.trainer == "rloo" and self.delta is not None:
            raise InvalidOption("TRL's RLOO trainer does not have this option; use trainer grpo", option="delta")

    def numbers(self, database: Database, pair: Pair, by: str, only: Sequence[str] = ()) -> Rows:
        from ..trace.columns import num_scored, why_nothing  # loads DuckDB, which help pages do not need

        if by == "run" and self.logging_steps is not None:
            raise InvalidOption(
                f"TRL does not log values for a whole run; use {option('by', 'step')}", option="logging_steps"
            )
        # TRL logs clipping metrics even without an engine, so a missing `rollout` pass is not an error.
        if pair[1] != ROLLOUT and pair[1] not in num_scored(database):
            raise NothingToCompare(why_nothing(database, pair))
        # super() without arguments fails here, because dataclass(slots=True) replaces this class with a new one.
        return Framework.numbers(self, database, pair, by, only)

    def row_calls(self, pair: Pair) -> Iterable[str]:
        bounds = (
            self.vllm_importance_sampling_mode, self.vllm_importance_sampling_clip_max,
            self.vllm_importance_sampling_clip_min,
        )  # fmt: skip
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clips = (self.trainer == "rloo", self.importance_sampling_level, self.epsilon, high, self.delta)
        return (
            f"trl_rows({quoted_pair(pair)}, {literals(bounds)})",
            f"trl_updates({quoted(pair[0])})",
            f"trl_clips({quoted(pair[0])}, {literals(clips)})",
        )

    def notes(self, database: Database, pair: Pair) -> list[str]:
        told = []
        if self.trainer == "grpo":
            told += null_without(database, (f"{_SAMPLING}*",), pair[1])
        if self._clips or self.loss_type == "cispo":
            told += null_without(database, (f"{_CLIPS}*" if self._clips else _CISPO,), CURRENT)
        if self.trainer == "rloo" or self.importance_sampling_level == "sequence":
            effect = "TRL counts the ratio of a sequence with such a token as not clipped"
            told += masked_out(database, (pair[0], CURRENT), "TRL", effect=effect)
        return told + set_otherwise(database, self._effective())

    @property
    def _clips(self) -> bool:
        return self.trainer == "rloo" or self.loss_type in CLIPPING

    def is_unlogged(self, column: str) -> bool:
        if column.startswith(_SAMPLING):
            return self.trainer == "rloo"
        if column.startswith(_CLIPS):
            return not self._clips
        return column == _CISPO and (self.trainer == "rloo" or self.loss_type != "cispo")

    def _effective(self) -> dict[str, object]:
        options = asdict(self)
        options["epsilon_high"] = self.epsilon if self.epsilon_high is None else self.epsilon_high
        options["logging_steps"] = 1 if self.logging_steps is None else self.logging_steps
        del options["trainer"]
        if self.trainer == "rloo":
            del options["loss_type"], options["importance_sampling_level"]
        return options


FRAMEWORK = Trl
