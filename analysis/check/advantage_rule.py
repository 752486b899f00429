"""Find the rule that turns the rewards of a step into its advantages. Shapes: N rows in the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BATCH = "a constant for the whole batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """The rule that turns rewards into advantages at one step."""

    name: str
    """`own` for the group's mean, `constant`, `clipped`, or the name of the baseline or reward order that fits; empty
    if nothing fits; `none` if rewards are equal within every group.
    """
    correlation: float = 0.0
    """Mean correlation between rewards and advantages within groups; `freedom` is the number of rows minus the number
    of groups.
    """
    freedom: float = 0.0
    between: float = 0.0
    """Standard deviation of the group means of the advantages, relative to the rms of all advantages."""
    fit: float = 0.0
    """Correlation between the recorded advantages and those that the rule gives; `own` is the same for the group mean
    as baseline.
    """
    own: float = 0.0
    factor: float | None = None
    """Scale of the advantages that no usual normalisation by group or batch explains; None if there is none."""


def rule_of(r: np.ndarray, a: np.ndarray, g: np.ndarray, *, explain: bool) -> AdvantageRule:
    """Compare rewards, [N], and advantages, [N], within groups, [N] ordered group indices; without `explain`, return
    only their correlation.
    """
    n, x, y = count_of(g), r - mean_of(g, r), a - mean_of(g, a)
    spread, spread_a = np.sqrt(mean_of(g, x * x)), np.sqrt(mean_of(g, y * y))
    varies = spread > 1e-6 * np.abs(r).max()
    both = varies & (spread_a > 1e-6 * np.sqrt(mean_of(g, a * a)))
    if not both.any():
        return AdvantageRule(name="constant" if varies.any() else "none", freedom=float((1 - 1 / n[varies]).sum()))
    correlation = float(np.mean((x * y)[both] / (spread * spread_a)[both]))
    freedom = float((1 - 1 / n[both]).sum())
    between = float(np.sqrt(np.mean((a - y - a.mean()) ** 2) / np.mean(a * a)))
    if not explain:
        return AdvantageRule(name="own" if correlation > 0.1 else "", correlation=correlation, freedom=freedom)
    spread[~varies] = np.nan
    own = max(_fit(x, a), _fit(x / spread, a))
    # With any other baseline, group means scatter by at least about 1 / sqrt(n) of the advantages; with the group's
    # own, only by rounding.
    has_own = correlation > 0.5 and between < 0.1 / np.sqrt(np.median(n))
    others = {} if has_own and own > 0.99 else _others(r, a, g, spread)
    fits = {name: max(_fit(given, a) for given in scales) for name, scales in others.items()}
    name = max(fits, key=fits.__getitem__, default="")
    if has_own and name != "clipped":
        return AdvantageRule(name="own", factor=_factor(r, a, x, spread, n), correlation=correlation, freedom=freedom)
    # A correct rule leaves less than 1 % of the variance unexplained (eps, rounding), far less than the group mean
    # leaves.
    is_clear = fits[name] > 0.995 and own < 0.99 and 1 - fits[name] < (1 - own) / 4
    return AdvantageRule(
        name=name if is_clear else "", correlation=correlation, freedom=freedom, between=between, fit=fits[name], own=own
    )  # fmt: skip


def _others(r: np.ndarray, a: np.ndarray, g: np.ndarray, spread: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Return the advantages that other rules give, raw and normalised."""

    def normalised(rewards: np.ndarray, label: np.ndarray) -> list[np.ndarray]:
        centred = rewards - mean_of(label, rewards)
        size = np.sqrt(mean_of(label, centred**2))
        return [centred, centred / np.where(size > 1e-6 * np.abs(r).max(), size, np.nan)]

    means, n, order = np.bincount(g, r) / np.bincount(g), np.median(count_of(g)), np.empty(len(r), np.int64)
    order[np.lexsort((a, g))] = np.lexsort((r, g))
    rules = {
        BATCH: [r],
        "clipped": [np.clip(scale * normalised(r, g)[1], a.min(), a.max()) for scale in (1.0, np.sqrt(1 - 1 / n))],
        f"the mean of every {len(means)}th row": normalised(r, np.arange(len(r)) % len(means)),
        "rewards of the same group in another order": normalised(r[order], g),
    }
    for name, by in (("previous", 1), ("next", -1)):
        other = r - np.roll(means, by)[g]
        rules[f"the {name} group's mean"] = [other, other / spread]
    for by in (1, -1, 2, -2, 3, -3, 4, -4):
        rules[f"rewards {abs(by)} rows {'later' if by > 0 else 'earlier'}"] = normalised(np.roll(r, -by), g)
    return rules


def _factor(r: np.ndarray, a: np.ndarray, x: np.ndarray, spread: np.ndarray, n: np.ndarray) -> float | None:
    """Return the ratio between the advantages and the rewards minus the group mean; None if it is a usual one or not
    constant.
    """
    few, size = max(int(n.min()), 2), float(np.nanmedian(spread))
    kept, of_batch = size / (size + 1e-4), float(np.std(x))  # eps is up to 1e-4
    x = np.where(np.isfinite(spread), x, np.nan)
    # Leave-one-out multiplies by n / (n - 1). The batch may be normalised over tokens instead of rows.
    usual = (
        (x / spread, kept * np.sqrt(1 - 1 / few), 1.0), (x, 1.0, few / (few - 1)), (x / np.std(r), 0.6, 1.8), (x / of_batch, 0.6, 1.8),
    )  # fmt: skip
    found = [(np.nansum(p * a) / np.nansum(p * p), low, high) for p, low, high in usual if _fit(p, a) > 0.999]
    is_usual = any(0.9 * low < factor < 1.1 * high for factor, low, high in found)
    return None if is_usual or not found else float(found[0][0])


def mean_of(label: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean [N] of the rows with the same label; labels are indices from 0."""
    return np.asarray((np.bincount(label, values) / np.maximum(np.bincount(label), 1))[label])


def count_of(label: np.ndarray) -> np.ndarray:
    """Return the number [N] of rows with the same label."""
    return np.asarray(np.bincount(label)[label])


def _fit(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation over the rows without NaN; 0 if fewer than 8 remain, or if one input is constant up to
    rounding.
    """
    x, y = x[known := np.isfinite(x)], y[known]
    if len(x) < 8:
        return 0.0
    dx, dy = x - x.mean(), y - y.mean()
    xx, yy = dx @ dx, dy @ dy
    is_constant = min(xx / max(x @ x, 1e-300), yy / max(y @ y, 1e-300)) < 1e-12
    return 0.0 if is_constant else float(dx @ dy / np.sqrt(xx * yy))
