"""Render `tim-trace replay`: plan, results, and estimates from a sample.

Shapes: G sampled groups per arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from ..replay.backends.trusted import WHY
from ..replay.plan import ReplayPlan
from ..replay.results import GroupSums, ReplayedStep, ReplayedSteps, by_arm
from .rows import Rows, table, to_text
from .statistics.estimators import Totals
from .statistics.intervals import NoInterval, Statistic, bootstrap


def plan_text(plan: ReplayPlan, width: int | None = None) -> str:
    """Render the plan of a replay: one row per arm."""
    return to_text(plan_rows(plan), width)


def plan_rows(plan: ReplayPlan) -> Rows:
    """Return a plan as a table."""
    names, rows = plan._table()
    return Rows(tuple(names), [tuple(row) for row in rows])


_LEAST_DEVICE_HOURS = 0.1
"""Minimum number of device hours for the estimate to show them."""


def estimate_sentence(plan: ReplayPlan) -> str:
    """Render the expected duration of a replay."""
    assert plan.seconds is not None
    tokens, arms = sum(arm.num_tokens for arm in plan), [arm for arm in plan if arm.num_tokens]
    scoring_s = sum(arm.num_tokens / arm.tokens_per_s for arm in arms if arm.tokens_per_s)
    pace = f" at {tokens / scoring_s:,.0f} tokens/s" if scoring_s else ""
    loads = sum(arm.num_versions for arm in plan)
    hours = plan.device_hours or 0.0
    device_hours = f", {hours:.2g} device hours" if hours >= _LEAST_DEVICE_HOURS else ""
    return (
        f"about {_duration(plan.seconds)}: {tokens:,} tokens in {len(arms)} arm{'s' * (len(arms) != 1)}{pace}, "
        f"{loads:,} weight load{'s' * (loads != 1)}{device_hours}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"


def not_held_reason(code: str) -> str:
    """Say why replaying as recorded did not reproduce the recorded bits."""
    return WHY[code].format(name="").replace("  ", " ")


def replay_text(found: Sequence[ReplayedStep], width: int | None = None) -> str:
    """Render replays: one row per arm."""
    estimates = replay_estimates(found) if isinstance(found, ReplayedSteps) else []
    return to_text(table(estimates or by_arm(found)), width)


# --- estimates from a sample ----------------------------------------------------------------------------------------------

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEstimate:
    """An arm's numbers over all sequences, estimated from a sample of groups; d = replay - train, nats.

    Bounds of 95% intervals are None without an interval.
    """

    arm: str
    num_steps: int
    """Number of steps with at least one group in the sample."""
    num_groups: int
    """Number of groups in the sample."""
    of_groups: int
    """Number of groups in all requested steps."""
    num_sequences: int
    """Number of sequences in the sample."""
    of_sequences: int
    """Number of sequences in all requested steps."""
    num_tokens: int
    """Number of tokens scored in the sample."""
    mean_abs_d: float
    mean_abs_d_low: float | None
    mean_abs_d_high: float | None
    k3: float
    """Mean of exp(d) - 1 - d."""
    k3_low: float | None
    k3_high: float | None
    share_equal: float
    """Share of tokens whose logprob equals the recorded one bit for bit."""
    share_equal_low: float | None
    share_equal_high: float | None
    no_interval: str | None
    """Reason why mean_abs_d has no interval; None if it has one."""
    identity_held: int
    """Number of steps in which replaying as recorded reproduced every bit."""


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
    """Return mean |d|, k3 and the share of equal tokens with 95% intervals, and why mean |d| has none.

    Estimates are ratios of totals, weighted by the number of groups that each drawn group represents (Cochran 1977, Sampling
    Techniques, section 6.11). Intervals are bootstrapped over groups and scaled by sqrt(1 - drawn / all groups) (section 2.8,
    finite population correction). Steps are not used as strata, so intervals are too wide rather than too narrow.
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
