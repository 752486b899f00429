"""What a sampled replay says of all sequences: estimates with intervals.

Shapes: G drawn groups of an arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from ..replay.results import GroupSums, ReplayedSteps, by_arm
from .statistics.estimators import Totals
from .statistics.intervals import NoInterval, Statistic, bootstrap

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEstimate:
    """An arm's numbers over all sequences, estimated from a sample of groups; d = replay - train, nats.

    Ends of 95 % intervals are None where there is none.
    """

    arm: str
    num_steps: int
    """Steps with a drawn group."""
    num_groups: int
    """That were drawn."""
    of_groups: int
    """Of all steps that were asked for."""
    num_sequences: int
    """That were drawn."""
    of_sequences: int
    """Of all steps that were asked for."""
    num_tokens: int
    """That were scored."""
    mean_abs_d: float
    mean_abs_d_low: float | None
    mean_abs_d_high: float | None
    k3: float
    """Mean of exp(d) - 1 - d."""
    k3_low: float | None
    k3_high: float | None
    share_equal: float
    """Share of tokens with the recorded bits."""
    share_equal_low: float | None
    share_equal_high: float | None
    no_interval: str | None
    """Why mean_abs_d has no interval."""
    identity_held: int
    """Steps in which replaying as recorded gave every bit back."""


_ESTIMATED: dict[str, Statistic] = {
    "mean_abs_d": lambda t: t["sum_abs_d"] / t["num_tokens"],
    "k3": lambda t: t["sum_k3"] / t["num_tokens"],
    "share_equal": lambda t: t["num_equal"] / t["num_tokens"],
}
_SUMS = ("num_tokens", "num_equal", "sum_abs_d", "sum_k3")


def replay_estimates(results: ReplayedSteps) -> list[ArmEstimate]:
    """Estimate each arm's numbers over all sequences from a sampled replay; empty without a sample."""
    sample = results.sample
    if sample is None:
        return []
    found = []
    for summary in by_arm(results):
        groups = [sums for sums in results.groups if sums.arm == summary.arm]
        if not groups:  # the recording was refused
            continue
        values, why = estimates(groups, sample.num_groups)
        found.append(
            ArmEstimate(
                arm=summary.arm,
                num_steps=summary.num_steps,
                num_groups=len(groups),
                of_groups=sample.num_groups,
                num_sequences=sum(sums.num_sequences for sums in groups),
                of_sequences=sample.num_sequences,
                num_tokens=summary.num_tokens,
                no_interval=why,
                identity_held=summary.identity_held,
                **values,
            )
        )
    return found


def estimates(groups: Sequence[GroupSums], of_groups: int) -> tuple[dict[str, Any], str | None]:
    """Mean |d|, k3 and the share of equal tokens with the ends of 95 % intervals, and why mean |d| has none.

    Ratios of totals in which each group counts as often as it stands for others (Cochran 1977, Sampling Techniques, section
    6.11). Intervals are the bootstrap's over groups, with both ends drawn in by the root of 1 - drawn / all groups (section
    2.8): what was drawn is certain. That steps are strata is not used, which leaves them too wide rather than too narrow.
    """
    weight_G = np.array([sums.weight for sums in groups])
    columns = {name: weight_G * np.array([getattr(sums, name) for sums in groups], np.float64) for name in _SUMS}
    totals: Totals = {name: np.asarray(values.sum()) for name, values in columns.items()}
    intervals = bootstrap(_ESTIMATED, columns, np.arange(len(groups)), CONFIDENCE)
    drawn_in = sqrt(max(0.0, 1 - len(groups) / of_groups))
    values: dict[str, Any] = {}
    for name, statistic in _ESTIMATED.items():
        with np.errstate(all="ignore"):
            value = float(statistic(totals))
        interval = intervals[name]
        if drawn_in == 0.0 and np.isfinite(value):
            interval = (value, value)
        least, most = 0.0, 1.0 if name == "share_equal" else np.inf
        low, high = (
            (None, None)
            if isinstance(interval, NoInterval)
            else (
                max(least, value + drawn_in * (interval[0] - value)),
                min(most, value + drawn_in * (interval[1] - value)),
            )
        )
        values |= {name: value, f"{name}_low": low, f"{name}_high": high}
    why = intervals["mean_abs_d"]
    return values, str(why) if isinstance(why, NoInterval) and drawn_in > 0 else None
