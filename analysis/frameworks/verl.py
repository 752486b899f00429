from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...schemas.errors import InvalidOption
from ..trace.macros import quoted_pair
from .framework import Framework, call, check_choice, literal, option_field
from .notes import in_half

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair

REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip

_PREFIX = "rollout_corr/rollout_rs_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verl(Framework):
    rollout_is: str | None = option_field(None, "Importance-sampling weights.", choices=("token", "sequence"))
    rollout_is_threshold: str = option_field(
        "2.0",
        "Upper bound for weights (TIS; 2.0), or two bounds outside which to mask them (IcePop).",
        metavar="UPPER|LOWER_UPPER",
    )
    rollout_is_batch_normalize: bool = option_field(False, "Normalize weights to mean 1.")
    rollout_rs: str | None = option_field(None, "Rejection rules, e.g. token_k1,seq_mean_k3.", metavar="OPTION,...")
    rollout_rs_threshold: str | None = option_field(
        None,
        "One bound for all rules, or one per rule. k1 bounds rollout / trainer, e.g. 0.5_2.0.",
        metavar="BOUND,...",
    )

    name: ClassVar[str] = "verl"
    version: ClassVar[str] = "0.9.0"
    source: ClassVar[str] = "verl/trainer/ppo/rollout_corr_helper.py, verl/utils/debug/metrics.py"

    def check(self) -> None:
        _check_bounds("rollout_is_threshold", self.rollout_is_threshold)
        if self.rollout_is is None and (self.rollout_is_batch_normalize or self.rollout_is_threshold != "2.0"):
            raise InvalidOption(
                "rollout_is_threshold and rollout_is_batch_normalize require rollout_is; set it to token or sequence"
            )
        _check_rejections(self.rollout_rs, self.rollout_rs_threshold)

    def numbers(self, database: Database, pair: Pair, by: str, only: Sequence[str] = ()) -> Rows:
        keys = ("run", "step")
        rows = database.ask(call("verl", pair, by, only))
        if only:
            return rows
        if self.rollout_is is not None and len(rows):
            given: dict[str, Any] = {"rollout_is": self.rollout_is, "rollout_is_threshold": self.rollout_is_threshold}
            weights = database.ask(call("verl_is", pair, by, **given))
            rows = rows.joined(weights.without({name for name in weights.columns if self.is_unlogged(name)}), keys)
        if self.rollout_rs is not None and len(rows):
            given = {"rollout_rs": self.rollout_rs, "rollout_rs_threshold": self.rollout_rs_threshold}
            rows = rows.joined(_wide(database.ask(call("verl_rs", pair, by, **given))), keys)
            masked = database.ask(
                f"SELECT * FROM verl_rs_masked({quoted_pair(pair)}, {literal(by == 'step')}, "
                f"{literal(self.rollout_rs)}, {literal(self.rollout_rs_threshold)})"
            )
            rows = rows.joined(masked if by == "step" else masked.without({"step"}), keys)
        return rows

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        import pyarrow as pa

        from .verl_sums import summed

        # Sum here rather than in a function that DuckDB calls, so that summing overlaps with reading.
        batches = database.connection.mapped_batches(f"SELECT * FROM verl_rows({quoted_pair(pair)})", summed)
        yield "verl_summed", pa.Table.from_batches(list(batches))

    def notes(self, database: Database, pair: Pair) -> list[str]:
        told = in_half(database, pair[0], "verl")
        if self.rollout_rs is not None and "k1" in self.rollout_rs:
            told.append("k1 bounds 1 / rho, the ratio rollout / trainer: 'lower_upper' keeps 1/upper <= rho <= 1/lower")
        return told

    def is_unlogged(self, column: str) -> bool:
        if column == "rollout_corr/rollout_is_oob_ratio":
            return "_" not in self.rollout_is_threshold
        return column == "rollout_corr/rollout_is_batch_norm_factor" and not self.rollout_is_batch_normalize


FRAMEWORK = Verl


def _wide(rows: Rows) -> Rows:
    """Merge each run's or step's rows (one row per option) into one row with columns `<option>_<statistic>`."""
    from ..rows import Rows

    found: dict[tuple[object, ...], dict[str, object]] = {}
    for row in rows.dicts():
        key = tuple(row.pop(name) for name in ("run", "step") if name in row)
        option = row.pop("option")
        values = {f"{_PREFIX}{option}_{name}": value for name, value in row.items()}
        found.setdefault(key, {}).update(
            {name: value for name, value in values.items() if option.endswith("k1") or "seq_fraction_low" not in name}
        )
    keys = tuple(name for name in ("run", "step") if name in rows.columns)
    columns = tuple(next(iter(found.values()), {}))
    return Rows(keys + columns, [(*key, *values.values()) for key, values in found.items()])


def _check_rejections(options: str | None, thresholds: str | None) -> None:
    if options is None:
        if thresholds is not None:
            raise InvalidOption(f"rollout_rs_threshold needs rollout_rs: one or more of {', '.join(REJECTIONS)}")
        return
    chosen = list(dict.fromkeys(part.strip() for part in options.split(",")))
    for option in chosen:
        check_choice("verl", "rollout_rs", option, REJECTIONS)
    if thresholds is None:
        raise InvalidOption("rollout_rs needs rollout_rs_threshold: one bound for all rules, or one per rule")
    bounds = [part.strip() for part in thresholds.split(",")]
    if len(bounds) not in (1, len(chosen)):
        raise InvalidOption(
            f"got {len(bounds)} bounds for {len(chosen)} rules; pass one for all rules, or one per rule",
            option="rollout_rs_threshold",
        )
    for option, bound in zip(chosen, bounds * len(chosen) if len(bounds) == 1 else bounds, strict=False):
        if "_" in bound and not option.endswith("k1"):
            raise InvalidOption(f"got {bound!r} for {option}; pass a single upper bound", option="rollout_rs_threshold")
        _check_bounds("rollout_rs_threshold", bound)


def _check_bounds(option: str, text: str) -> None:
    try:
        bounds = [float(part) for part in text.split("_", 1)]
    except ValueError:
        bounds = []
    if not bounds or not all(bound > 0 for bound in bounds) or bounds != sorted(bounds):
        raise InvalidOption(
            f"got {text!r}; write upper or lower_upper, both above 0, e.g. 2.0 or 0.5_5.0", option=option
        )


def register(connection: duckdb.DuckDBPyConnection) -> None:
    """Register `verl_sums(old FLOAT[], rollout FLOAT[], mask BOOLEAN[])` on a connection.

    With an empty mask, every token is included. A token that lacks a logprob in either list is left out of all sums.
    """
    from .verl_sums import STRUCT, verl_sums

    connection.create_function("verl_sums", verl_sums, ["FLOAT[]", "FLOAT[]", "BOOLEAN[]"], STRUCT, type="arrow")
