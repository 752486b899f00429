"""How far the sampling weights were behind, as the trace declares or as its logprobs show."""

from __future__ import annotations

import numpy as np

from ..facts import Facts
from ..staleness import StaleWeights


def declared_lag(facts: Facts) -> float:
    """Median number of updates between the weights that scored a sequence and those that sampled it; 0 where unknown."""
    values = facts.values("version_lag")
    known = np.abs(values[np.isfinite(values)])
    return float(np.median(known)) if len(known) else 0.0


def heard(echo: StaleWeights) -> str:
    """An echo in words."""
    return (
        f"the engine's logprobs of openings that came again are the trainer's of {echo.steps} steps before "
        f"({echo.left:.0%} of the gap is left, {echo.num_pairs:,} openings)"
    )


def missed(echo: StaleWeights) -> str:
    """The lack of one."""
    return (
        f"at no distance up to {echo.farthest} steps are the engine's logprobs of openings that came again those of the "
        f"trainer before (at best {echo.left:.0%} of the gap is left)"
    )
