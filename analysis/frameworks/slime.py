from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from ...schemas.errors import InvalidOption, option
from ...schemas.passes import CURRENT
from ..trace.macros import quoted_pair
from .framework import Framework, literals, option_field
from .notes import masked_out, null_without

if TYPE_CHECKING:
    from ..trace.database import Database
    from ..trace.source import Pair

LEVELS = ("token", "sequence", "geometric")

_OF_MIS = (
    "tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize", "use_rs", "rs_level",
    "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold",
)  # fmt: skip
"""Options that require use_tis."""

_OF_MODES = {
    "truncate": {"mis_tis_truncate_fraction"},
    "clip": {"mis_tis_clip_fraction_low", "mis_tis_clip_fraction_high"},
    "mask": {"mis_tis_mask_fraction_low", "mis_tis_mask_fraction_high"},
}
"""The metrics that slime logs only in the given tis_mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slime(Framework):
    """Options for slime's truncated importance sampling and loss averaging, and for its example mis.py.

    The options for mis.py default to the values in its mis.yaml.
    """

    tis_clip: float = option_field(2.0, "Upper bound for token ratios (2.0).", metavar="C")
    tis_clip_low: float = option_field(0.0, "Lower bound for token ratios (0).", metavar="C")
    calculate_per_token_loss: bool = option_field(False, "Average over tokens.")
    use_tis: bool = option_field(False, "Weight and reject as slime's example mis.py does.")
    tis_level: str = option_field("token", "Level at which weights are computed (token; mis.py).", choices=LEVELS)
    tis_mode: str = option_field(
        "truncate", "What to do with weights outside the bounds (truncate; mis.py).", choices=tuple(_OF_MODES)
    )
    tis_lower_bound: float | None = option_field(None, "Lower bound for weights (1 / upper; mis.py).", metavar="C")
    """None means 1 / tis_upper_bound."""
    tis_upper_bound: float = option_field(2.0, "Upper bound for weights (2.0; mis.py).", metavar="C")
    tis_batch_normalize: bool = option_field(True, "Normalize weights to mean 1 (on; mis.py).")
    use_rs: bool = option_field(True, "Reject based on weights (on; mis.py).")
    rs_level: str = option_field("token", "Level at which to reject (token; mis.py).", choices=LEVELS)
    rs_lower_bound: float | None = option_field(None, "Reject weights below C (tis_lower_bound; mis.py).", metavar="C")
    """None means tis_lower_bound."""
    rs_upper_bound: float | None = option_field(None, "Reject weights above C (tis_upper_bound; mis.py).", metavar="C")
    """None means tis_upper_bound."""
    rs_veto_threshold: float = option_field(
        1e-4, "Reject sequences with any token ratio below C; 0 disables (1e-4; mis.py).", metavar="C", at_least=0
    )

    name: ClassVar[str] = "slime"
    version: ClassVar[str] = "0.3.1"
    source: ClassVar[str] = (
        "slime/backends/megatron_utils/loss.py, cp_utils.py, examples/train_infer_mismatch_helper/mis.py"
    )

    def check(self) -> None:
        if not 0 <= self.tis_clip_low <= self.tis_clip:
            raise InvalidOption(
                f"got {self.tis_clip_low:g}; it must be between 0 and tis_clip, {self.tis_clip:g}",
                option="tis_clip_low",
            )
        self._check_bounds()
        for field in fields(self):
            if not self.use_tis and field.name in _OF_MIS and getattr(self, field.name) != field.default:
                raise InvalidOption(f"{field.name} needs use_tis")
        if self.use_tis and self.tis_batch_normalize and self.tis_level == "geometric":
            raise InvalidOption(
                "slime does not normalize with tis_level geometric; turn normalization off with "
                f"{option('tis_batch_normalize', False)}",
                option="tis_batch_normalize",
            )

    def _check_bounds(self) -> None:
        if self.tis_upper_bound <= 0:
            raise InvalidOption(f"got {self.tis_upper_bound:g}; pass a number above 0", option="tis_upper_bound")
        tis_lower = 1 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        if self.tis_mode != "truncate" and not tis_lower < self.tis_upper_bound:
            raise InvalidOption(f"got {tis_lower:g}; it must be below tis_upper_bound", option="tis_lower_bound")
        lower = tis_lower if self.rs_lower_bound is None else self.rs_lower_bound
        upper = self.tis_upper_bound if self.rs_upper_bound is None else self.rs_upper_bound
        if self.use_tis and self.use_rs and not lower < upper:
            raise InvalidOption(f"got {lower:g}; it must be below rs_upper_bound, {upper:g}", option="rs_lower_bound")

    def is_unlogged(self, column: str) -> bool:
        if not self.use_tis:
            return column.startswith(("mis_tis_", "mis_rs_", "mis_is_", "mis_batch_"))
        if column.startswith("mis_rs_"):
            return not self.use_rs
        if column == "mis_batch_norm_factor":
            return not self.tis_batch_normalize
        return any(column in names for mode, names in _OF_MODES.items() if mode != self.tis_mode)

    def row_calls(self, pair: Pair) -> Iterable[str]:
        options = literals(getattr(self, name) for name in ("use_tis", *_OF_MIS))
        asked, options = quoted_pair(pair), f"slime_options({options})"
        clips = literals((self.tis_clip, self.tis_clip_low))
        return f"slime_rows({asked}, {clips}, {options})", f"slime_updates({asked}, {options})"

    def notes(self, database: Database, pair: Pair) -> list[str]:
        rejects = self.use_tis and (self.use_rs or self.tis_mode == "mask")
        return [
            *null_without(database, ("ppo_kl", "ois"), CURRENT),
            *masked_out(database, (*pair, CURRENT), "slime", rejects=rejects),
        ]


FRAMEWORK = Slime
