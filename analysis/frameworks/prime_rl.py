"""prime-rl's numbers of the difference between the inference's logprobs and the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption, option
from ..trace.quoting import quoted_pair
from .framework import TokenMedians, call, literals, option_field, options_of, rows_of
from .notes import null_without

if TYPE_CHECKING:
    import pyarrow as pa

    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRl:
    """The options of prime-rl's losses that decide which tokens are masked."""

    dppo_mask_low: float = option_field(0.2, "Largest fall of a probability (0.2).", metavar="P")
    """Largest fall of a token's probability where its advantage is not positive."""
    dppo_mask_high: float = option_field(0.2, "Largest rise of a probability (0.2).", metavar="P")
    """Largest rise where its advantage is positive."""
    ipo_threshold: float | None = option_field(None, "The loss ipo, and its bound.", metavar="P")
    """Of the loss `ipo`: largest change of a probability either way; None: the default loss."""

    name: ClassVar[str] = "prime-rl"
    version: ClassVar[str] = "0.8.0"
    source: ClassVar[str] = "src/prime_rl/trainer/rl/loss.py, src/prime_rl/trainer/rl/train.py"

    def __post_init__(self) -> None:
        for name, value in options_of(self).items():
            if value is not None and value < 0:
                raise InvalidOption(f"got {value:g}; give a difference of probabilities from 0 on", option=name)

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        rows = database.ask(call("prime_rl", pair, by, **options_of(self)))
        of_signs = ("is_masked_low", "is_masked_high", "masked_advantage_positive", "masked_advantage_negative")
        if self.ipo_threshold is None:
            return rows
        return rows.without({name for name in rows.columns if name.startswith(of_signs)})

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        return rows_of(database, (f"prime_rl_rows({self._arguments(pair)})",))

    def token_medians(self, pair: Pair) -> TokenMedians | None:
        arguments = self._arguments(pair)
        return TokenMedians(
            macro="prime_rl_medians", tokens=f"prime_rl_tokens({arguments})",
            columns={"median_kl": "mismatch_kl", "median_entropy": "entropy"},
        )  # fmt: skip

    def _arguments(self, pair: Pair) -> str:
        return f"{quoted_pair(pair)}, {literals((self.dppo_mask_low, self.dppo_mask_high, self.ipo_threshold))}"

    def notes(self, database: Database, pair: Pair) -> list[str]:
        return [
            f"prime-rl's trainer is the policy inside the loss: with several updates a step, ask {option('pair', 'current:rollout')}",
            *null_without(database, ("entropy/all", "kl_ent_ratio"), pair[0], column="entropy", what="entropy of pass"),
        ]


FRAMEWORK = PrimeRl
