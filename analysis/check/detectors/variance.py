"""How much of the variance of values lies between groups of them."""

from __future__ import annotations

import numpy as np


def between(values: np.ndarray, group: np.ndarray) -> tuple[float, float]:
    """Adjusted share of the variance of values, [K], that their groups, [K], explain, and its distance from 0 in standard
    deviations of pure noise; 0 and 0 where there is one group, or no value beside the groups' first ones."""
    _, place = np.unique(group, return_inverse=True)
    count = np.bincount(place).astype(float)
    num, groups = len(values), len(count)
    if groups < 2 or num <= groups:
        return 0.0, 0.0
    means = np.bincount(place, values) / count
    centred = values - values.mean()
    total = float(centred @ centred)
    explained = float(np.sum(count * (means - values.mean()) ** 2))
    if total <= 0:
        return 0.0, 0.0
    ratio = (explained / (groups - 1)) / max((total - explained) / (num - groups), 1e-30)
    adjusted = 1 - ((total - explained) / (num - groups)) / (total / (num - 1))
    return float(adjusted), float((ratio - 1) / np.sqrt(2 / (groups - 1) + 2 / (num - groups)))
