from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import option
from ..trace.macros import quoted_pair
from .framework import Framework, literals, option_field
from .notes import null_without

if TYPE_CHECKING:
    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair

_OF_SIGNS = ("is_masked_low", "is_masked_high", "masked_advantage_positive", "masked_advantage_negative")
"""Metrics that are split by the sign of the advantage. prime-rl does not log them for the ipo loss."""


_OF_TOKENS = frozenset(("mismatch_kl/all/median", "entropy/all/median"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRl(Framework):
    dppo_mask_low: float = option_field(
        0.2, "Mask tokens with A <= 0 whose probability drops by more than P (default: 0.2).", metavar="P", at_least=0
    )
    dppo_mask_high: float = option_field(
        0.2, "Mask tokens with A > 0 whose probability rises by more than P (default: 0.2).", metavar="P", at_least=0
    )
    ipo_threshold: float | None = option_field(None, "Use the ipo loss with bound P.", metavar="P", at_least=0)

    name: ClassVar[str] = "prime-rl"
    version: ClassVar[str] = "0.8.0"
    source: ClassVar[str] = "src/prime_rl/trainer/rl/loss.py, src/prime_rl/trainer/rl/train.py"
    columns: ClassVar[str] = ", ".join(
        f'{name}.{statistic} AS "{name}/{statistic}"'
        for name in ("masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked", *_OF_SIGNS)
        for statistic in ("mean", "median", "std", "min", "max")
    )

    def numbers(self, database: Database, pair: Pair, by: str, only: Sequence[str] = ()) -> Rows:
        if not only or not _OF_TOKENS.isdisjoint(only):
            return Framework.numbers(self, database, pair, by, only)
        columns = ", ".join(f'"{name}"' for name in only)
        arguments = f"{quoted_pair(pair)}, {literals((by == 'step', *asdict(self).values()))}"
        return database.ask(f"SELECT {columns} FROM prime_rl_from_rows({arguments}) ORDER BY run, step")

    def is_unlogged(self, column: str) -> bool:
        return self.ipo_threshold is not None and column.startswith(_OF_SIGNS)

    def row_calls(self, pair: Pair) -> Iterable[str]:
        return (f"prime_rl_rows({quoted_pair(pair)}, {literals(asdict(self).values())})",)

    def notes(self, database: Database, pair: Pair) -> list[str]:
        return [
            f"prime-rl compares rollouts with the current policy: with several updates per step, use {option('pair', 'current:rollout')}",
            *null_without(database, ("entropy/all", "kl_ent_ratio"), pair[0], column="entropy", what="entropy of pass"),
        ]


FRAMEWORK = PrimeRl
