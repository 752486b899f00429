"""An explanation of the mismatch at some tokens, and the residual that it leaves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .finding import Finding
from .likelihood import apart, gain
from .pair_data import PairData
from .rounding import value_rounding
from .where import Where

CLAIM_NATS = 8.0
"""Cost, nats, of naming any cause: by chance, one run in 3,000 gets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """An explanation, with the tokens assigned to it if it is accepted."""

    finding: Finding
    tokens: np.ndarray
    """[N] bool: the tokens that it explains."""
    gain: float
    """Increase in the log likelihood of d, nats, compared with no explanation."""
    left: float | None = None
    """Share of the mismatch at its tokens that its prediction leaves unexplained; None if it does not predict sizes."""
    rank: int = 0
    """1 for an explanation with many parameters: another with at least half of its gain is preferred."""
    right: np.ndarray | None = None
    """[N] d after moving values to the right tokens or converting their unit; None if the explanation does neither."""
    place: Where | None = None
    """The place of the tokens, if the explanation is confined to it."""
    beside: Finding | None = None
    """Finding for the place of the tokens, if the explanation covers only the values at one place."""


def predicting(
    data: PairData, finding: Finding, residual: np.ndarray, cost: float, tokens: np.ndarray, *, is_right: bool = False
) -> Hypothesis:
    """Return an explanation that predicts d up to a residual, [K] nats, at the tokens, [K] bool, and does not change d
    elsewhere. `cost` is the cost of its parameters, nats. `is_right` is True if the residual is what d would be without
    the fault, so that it can be judged again.
    """
    left = np.where(tokens & np.isfinite(residual), residual, data.d)
    right = None
    if is_right:
        right = np.full(len(data.keep), np.nan)
        right[data.keep] = np.where(tokens, residual, data.d)
    size = float(np.sum(data.d[tokens] ** 2))
    return Hypothesis(
        finding=finding, tokens=data.marked(tokens), gain=gain(data, left, cost + CLAIM_NATS), right=right,
        left=float(np.sqrt(np.sum(left[tokens] ** 2) / max(size, 1e-30))),
    )  # fmt: skip


def of_signs(data: PairData, finding: Finding, sign: np.ndarray, cost: float, tokens: np.ndarray) -> Hypothesis:
    """Return an explanation that predicts the sign of d, [K] -1, 0 or 1, but not its size. Under rounding, each sign
    occurs half of the time, so a share p of correct signs among n tokens gains n (log 2 - H(p)) nats.
    """
    asked = (np.abs(data.d) > 2 * value_rounding(data)) & (sign != 0) & tokens
    num = int(asked.sum())
    right = float(np.clip(np.mean(np.sign(data.d[asked]) == sign[asked]), 1e-6, 1 - 1e-6)) if num else 0.5
    entropy = -right * np.log(right) - (1 - right) * np.log(1 - right)
    worth = num * (np.log(2) - entropy) if right > 0.5 else 0.0
    return Hypothesis(finding=finding, tokens=data.marked(tokens), gain=float(worth) - cost - CLAIM_NATS)


def located(
    data: PairData, finding: Finding, tokens: np.ndarray, cost: float, place: Where | None = None
) -> Hypothesis:
    """Return an explanation that predicts at which tokens, [K] bool, d is off, but not by how much. Its gain is that of
    fitting a separate level of mismatch there.
    """
    gain = apart(data, tokens, ~tokens) - cost - CLAIM_NATS
    return Hypothesis(finding=finding, tokens=data.marked(tokens), gain=gain, place=place)
