"""verl's off-policy numbers, importance-sampling weights and rejections.

Shapes: T tokens of several sequences, one after the other; N sequences. The sums of a sequence depend on its own tokens alone,
so that they have the same digits whatever is computed beside them, and by how many threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import duckdb
import numpy as np
import pyarrow as pa

from ...schemas.errors import InvalidOption
from ..rows import Rows
from ..statistics.moments import centred, co_moment
from ..trace.database import Database
from ..trace.pair_sums import OF_PROBABILITIES, expm1_minus, prob_differences, probability_sums
from ..trace.pairs import quoted_pair
from ..trace.ragged import blocks, tokens_of
from ..trace.source import Pair
from .framework import call, check_choice, literal, option_field
from .notes import in_half

REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""What `rollout_rs` can be made of."""

_PREFIX = "rollout_corr/rollout_rs_"

SAFETY_BOUND = 20.0
"""verl clamps log-ratios to +-20 nats before it takes their exp."""

_KEYS = ("run", "step", "seq_id", "iteration_a", "iteration_b")

_SUMS = (
    "sum_old", "sum_rollout", "sum_d", "sum_k3", "sum_expm1_2d", "sum_prob_diff", "max_prob_diff", "mean_prob_diff",
    "spread_prob_diff", *OF_PROBABILITIES,
)  # fmt: skip
"""Sums, the largest, and means with sums of squares around them; pass a of OF_PROBABILITIES is the trainer, b the rollout."""

STRUCT = f"STRUCT(num_tokens BIGINT, {', '.join(f'{name} DOUBLE' for name in _SUMS)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verl:
    """The options of verl's rollout correction."""

    rollout_is: str | None = option_field(None, "Importance-sampling weights.", choices=("token", "sequence"))
    """Importance-sampling weights of each `token` or of each `sequence`; None: none."""
    rollout_is_threshold: str = option_field(
        "2.0", "Cut weights (TIS; 2.0) or mask them (IcePop).", metavar="UPPER|LOWER_UPPER"
    )
    """Largest weight (TIS), or `lower_upper`: weights outside become 0 (IcePop)."""
    rollout_is_batch_normalize: bool = option_field(False, "Weights of mean 1.")
    """Divide the weights by their mean."""
    rollout_rs: str | None = option_field(None, "Rejections, as token_k1,seq_mean_k3.", metavar="OPTION,...")
    """Rejections, of REJECTIONS, with commas between; None: none."""
    rollout_rs_threshold: str | None = option_field(
        None, "One for all or one each; k1's lie on 1 / rho, as 0.5_2.0.", metavar="BOUND,..."
    )
    """A bound for all of them, or one each; of k1 `lower_upper`, bounds on 1 / rho."""

    name: ClassVar[str] = "verl"
    version: ClassVar[str] = "0.9.0"
    source: ClassVar[str] = "verl/trainer/ppo/rollout_corr_helper.py, verl/utils/debug/metrics.py"

    def __post_init__(self) -> None:
        check_choice("verl", "rollout_is", self.rollout_is, ("token", "sequence"))
        _check_bounds("rollout_is_threshold", self.rollout_is_threshold)
        if self.rollout_is is None and (self.rollout_is_batch_normalize or self.rollout_is_threshold != "2.0"):
            raise InvalidOption(
                "rollout_is_threshold and rollout_is_batch_normalize need rollout_is: token or sequence"
            )
        _check_rejections(self.rollout_rs, self.rollout_rs_threshold)

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        keys = ("run", "step")
        rows = database.ask(call("verl", pair, by))
        if self.rollout_is is not None and len(rows):
            given: dict[str, str | None] = {
                "rollout_is": self.rollout_is,
                "rollout_is_threshold": self.rollout_is_threshold,
            }
            rows = rows.joined(database.ask(call("verl_is", pair, by, **given)).without(self._unlogged()), keys)
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
        # The function that DuckDB calls gives them here beside the reading, which it does not wait for.
        batches = database.connection.mapped_batches(f"SELECT * FROM verl_rows({quoted_pair(pair)})", _summed)
        yield "verl_summed", pa.Table.from_batches(list(batches))

    def token_medians(self, pair: Pair) -> None:
        return None

    def notes(self, database: Database, pair: Pair) -> list[str]:
        told = in_half(database, pair[0], "verl")
        if self.rollout_rs is not None and "k1" in self.rollout_rs:
            told.append(
                "the bounds of k1 lie on 1 / rho, rollout over trainer: 'lower_upper' keeps 1/upper <= rho <= 1/lower"
            )
        return told

    def _unlogged(self) -> set[str]:
        """Columns that verl does not log with these options."""
        names = set()
        if "_" not in self.rollout_is_threshold:
            names.add("rollout_corr/rollout_is_oob_ratio")
        if not self.rollout_is_batch_normalize:
            names.add("rollout_corr/rollout_is_batch_norm_factor")
        return names


FRAMEWORK = Verl


def _wide(rows: Rows) -> Rows:
    """A row a group and option as a row a group: `<option>_<statistic>` for every option."""
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
            raise InvalidOption(f"rollout_rs_threshold needs rollout_rs: one or some of {', '.join(REJECTIONS)}")
        return
    chosen = list(dict.fromkeys(part.strip() for part in options.split(",")))
    for option in chosen:
        check_choice("verl", "rollout_rs", option, REJECTIONS)
    if thresholds is None:
        raise InvalidOption("rollout_rs needs rollout_rs_threshold: one bound for all options, or one each")
    bounds = [part.strip() for part in thresholds.split(",")]
    if len(bounds) not in (1, len(chosen)):
        raise InvalidOption(
            f"got {len(bounds)} bounds for {len(chosen)} options; give 1 or as many", option="rollout_rs_threshold"
        )
    for option, bound in zip(chosen, bounds * len(chosen) if len(bounds) == 1 else bounds, strict=False):
        if "_" in bound and not option.endswith("k1"):
            raise InvalidOption(
                f"got {bound!r} for {option}; give it a single upper bound", option="rollout_rs_threshold"
            )
        _check_bounds("rollout_rs_threshold", bound)


def _check_bounds(option: str, text: str) -> None:
    """Raise InvalidOption for what is neither `upper` nor `lower_upper`, both above 0."""
    try:
        bounds = [float(part) for part in text.split("_", 1)]
    except ValueError:
        bounds = []
    if not bounds or not all(bound > 0 for bound in bounds) or bounds != sorted(bounds):
        raise InvalidOption(f"got {text!r}; write upper or lower_upper, both above 0, as 2.0 or 0.5_5.0", option=option)


def register(connection: duckdb.DuckDBPyConnection) -> None:
    """Give a connection the function `verl_sums(old FLOAT[], rollout FLOAT[], mask BOOLEAN[])`.

    An empty mask counts every token. A token without a logprob in one of both counts in no sum.
    """
    connection.create_function("verl_sums", _verl_sums, ["FLOAT[]", "FLOAT[]", "BOOLEAN[]"], STRUCT, type="arrow")


def _summed(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Keys and sums of the sequences of `verl_rows`."""
    sums = _verl_sums(rows.column("old"), rows.column("rollout"), rows.column("mask"))
    names = [*_KEYS, *(field.name for field in sums.type)]
    return pa.RecordBatch.from_arrays([*(rows.column(name) for name in _KEYS), *sums.flatten()], names)


def token_sums(old_T: np.ndarray, rollout_T: np.ndarray, num_tokens_N: np.ndarray) -> np.ndarray:
    """[16, N] sums over sequences that have so many tokens each, one at least; NaN and infinities pass through."""
    found = np.empty((len(_SUMS), len(num_tokens_N)))
    for sequences, tokens, starts in blocks(num_tokens_N):
        with np.errstate(all="ignore"):
            sums = _sums(old_T[tokens].astype(np.float64), rollout_T[tokens].astype(np.float64), starts)
        for place, name in enumerate(_SUMS):
            found[place, sequences] = sums[name]
    return found


def _sums(old_T: np.ndarray, rollout_T: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Each of `_SUMS` of each sequence of a block."""
    d_T = old_T - rollout_T
    growth_T = np.expm1(d_T)
    num = np.diff(np.append(starts, len(d_T))).astype(np.float64)
    diff_T = prob_differences(old_T, rollout_T, growth_T)
    terms = {
        "sum_old": old_T, "sum_rollout": rollout_T, "sum_d": d_T, "sum_k3": expm1_minus(d_T, growth_T),
        "sum_expm1_2d": np.expm1(2 * np.clip(d_T, -SAFETY_BOUND, SAFETY_BOUND)), "sum_prob_diff": diff_T,
    }  # fmt: skip
    diff = centred(diff_T, starts, num)
    return {name: np.add.reduceat(term, starts) for name, term in terms.items()} | {
        "max_prob_diff": np.maximum.reduceat(diff_T, starts), "mean_prob_diff": diff.mean_N,
        "spread_prob_diff": co_moment(diff, diff, starts, num), **probability_sums(old_T, rollout_T, starts),
    }  # fmt: skip


def _verl_sums(old: Any, rollout: Any, mask: Any) -> pa.StructArray:
    tokens = tokens_of({"old": old, "rollout": rollout}, mask=mask)
    tokens = tokens.where(tokens.counted_T)
    num_tokens = tokens.lengths_N
    found = np.zeros((len(_SUMS), len(num_tokens)))
    full = num_tokens > 0
    found[:, full] = token_sums(tokens.logprobs["old"], tokens.logprobs["rollout"], num_tokens[full])
    arrays = [pa.array(num_tokens, pa.int64()), *(pa.array(row) for row in found)]
    return pa.StructArray.from_arrays(arrays, ["num_tokens", *_SUMS])
