"""How far the sampling weights were behind, as the trace declares."""

from __future__ import annotations

import numpy as np

from ..facts import Facts


def declared_lag(facts: Facts) -> float:
    """Median number of updates between the weights that scored a sequence and those that sampled it; 0 where unknown."""
    values = facts.values("version_lag")
    known = np.abs(values[np.isfinite(values)])
    return float(np.median(known)) if len(known) else 0.0


def is_declared_fresh(facts: Facts) -> bool:
    """Whether the trace says of every step that the weights that sampled were those that scored."""
    values = facts.values("version_lag")
    known = values[np.isfinite(values)]
    return bool(len(known)) and not known.any()
