"""Detect values in the wrong unit: logarithms to a different base, the opposite sign, or probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import BASE_RESIDUAL, MAX_LOGPROB, MIN_SPREAD

_LN2, _LN10 = float(np.log(2.0)), float(np.log(10.0))


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(values))


UNITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "log2": lambda values: values * _LN2,
    "log10": lambda values: values * _LN10,
    "probability": _log,
    "negative_ln": np.negative,
    "negative_log2": lambda values: -values * _LN2,
}
"""Unit in which a pass may have been recorded instead of nats -> function that converts to nats."""


def find_unit(data: PairData) -> list[Finding]:
    """Detect a pass whose values agree with the other pass once converted from a different unit."""
    if data.num_kept < 8 or min(np.std(data.a), np.std(data.b)) < MIN_SPREAD:
        return []
    best: tuple[float, str, str] | None = None
    sides = {data.sample.a.name: (data.a, data.b), data.sample.b.name: (data.b, data.a)}
    size = _typical(data.d)
    for name, (values, other) in sides.items():
        for unit, to_nats in UNITS.items():
            if unit.startswith("negative") and np.median(values) < 0:
                continue
            if unit == "probability" and np.max(values) > 1 + MAX_LOGPROB:
                continue
            nats = to_nats(values)
            if not np.mean(np.isfinite(nats)) > 0.99:
                continue
            residual = _typical((nats - other)[np.isfinite(nats)])
            if best is None or residual < best[0]:
                best = (residual, name, unit)
    # With a near-deterministic policy, both passes hold 0, which is the same in every unit.
    if best is None or size == 0 or best[0] > BASE_RESIDUAL * size:
        return []
    residual, name, unit = best
    return [
        data.finding(
            "log_base",
            "other_unit",
            weight=1 - residual / size,
            next=commands.sql(
                data, "SELECT logprob_a, logprob_b, logprob_a / logprob_b AS ratio FROM {pair} WHERE mask LIMIT 20"
            ),
            numbers={"side": name, "unit": unit, "residual": residual, "size": size},
        )
    ]


def _typical(d: np.ndarray) -> float:
    """Return the mean of |d| without its largest tenth, nats."""
    size = np.sort(np.abs(d))
    return float(np.mean(size[: max(int(len(size) * 0.9), 1)]))
