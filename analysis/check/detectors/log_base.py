"""Values in another unit: another base, another sign, or no logarithm at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import commands
from ..evidence import Evidence
from ..finding import Finding
from ..thresholds import BASE_RESIDUAL, MIN_SPREAD

_LN2, _LN10 = float(np.log(2.0)), float(np.log(10.0))


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(values))


UNITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "logarithms of base 2": lambda values: values * _LN2,
    "logarithms of base 10": lambda values: values * _LN10,
    "probabilities": _log,
    "negative logprobs": np.negative,
    "negative logarithms of base 2": lambda values: -values * _LN2,
}
"""What a side may hold instead of logprobs -> how it becomes nats."""


def find_unit(evidence: Evidence) -> list[Finding]:
    """One side's values agree with the other's once they are taken for something else than natural logarithms."""
    if evidence.num_kept < 8 or min(np.std(evidence.a), np.std(evidence.b)) < MIN_SPREAD:
        return []
    best: tuple[float, str, str] | None = None
    sides = {evidence.sample.a.name: (evidence.a, evidence.b), evidence.sample.b.name: (evidence.b, evidence.a)}
    gap = _typical(evidence.d)
    for name, (values, other) in sides.items():
        for unit, to_nats in UNITS.items():
            if unit.startswith("negative") and np.median(values) < 0:
                continue
            nats = to_nats(values)
            if not np.mean(np.isfinite(nats)) > 0.99:
                continue
            residual = _typical((nats - other)[np.isfinite(nats)])
            if best is None or residual < best[0]:
                best = (residual, name, unit)
    # Of a policy that is sure of nearly all its tokens both sides hold 0, which is 0 in every unit.
    if best is None or gap == 0 or best[0] > BASE_RESIDUAL * gap:
        return []
    residual, name, unit = best
    return [
        Finding(
            code="log_base",
            evidence=f"{name} holds {unit}: taken for these, half of the tokens agree to {residual:.2g} nats, as they stand "
            f"to {gap:.2g}",
            effect=evidence.rms(),
            share=1.0,
            weight=1 - residual / gap,
            next=commands.sql(
                evidence, "SELECT logprob_a, logprob_b, logprob_a / logprob_b AS ratio FROM {pair} WHERE mask LIMIT 20"
            ),
            numbers={"side": name, "unit": unit, "residual": residual},
        )
    ]


def _typical(d: np.ndarray) -> float:
    """Mean |d| without the largest tenth, nats."""
    size = np.sort(np.abs(d))
    return float(np.mean(size[: max(int(len(size) * 0.9), 1)]))
