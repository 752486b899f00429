"""What a figure shows at one step: numbers that the page puts in the place of the whole run's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..chart import Chart, Density, Histogram, Lines
from .packing import floats


def frames_of(charts: Iterable[Chart]) -> dict[str, Any]:
    """Key of a chart -> the steps that it has values of, and these values by the column of its data that they replace."""
    found = {}
    for one in charts:
        by_step = getattr(one, "by_step", {})
        if by_step:
            steps = sorted(by_step)
            found[one.key] = {"steps": steps, "fields": _fields(one, steps)}
    return found


def _fields(one: Chart, steps: list[int]) -> list[dict[str, Any]]:
    if isinstance(one, Density):
        counts = np.stack([one.by_step[step] for step in steps])
        return [_field(one.key, 0, "density", counts)]
    if isinstance(one, Histogram):
        return [
            _field(one.key, place, "counts", np.stack([one.by_step[step][name] for step in steps]))
            for place, name in enumerate(one.counts)
        ]
    assert isinstance(one, Lines)
    return [
        _field(one.key, place, "values", np.stack([one.by_step[step][place] for step in steps]))
        for place in range(len(one.lines))
    ]


def _field(key: str, place: int, kind: str, values: np.ndarray) -> dict[str, Any]:
    size = int(np.prod(values.shape[1:]))
    return {"source": f"{key}/{place}", "kind": kind, "size": size, "data": floats(values)}
