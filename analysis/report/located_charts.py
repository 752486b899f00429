"""Charts of where two executions diverge, from the newest `locate` result: errors by layer, shares of the mismatch up to a layer,
and the share that each patch removes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ...tracer.located.results import BEYOND
from ..locate_text import sentence
from ..located import LocatedResult
from ..location import Location
from . import chart, text
from .chart import Band, Bar, BarChart, Chart, Line, LineChart

_MOST_LINES = 5
"""Maximum number of operator kinds drawn as lines, those with the largest errors."""
_MOST_BARS = 12
"""Maximum number of patches drawn as bars, those that remove the largest share of the mismatch."""
_SQL = "SELECT {columns} FROM operators WHERE result = '{result}' ORDER BY side, forward_order"


def located_charts(result: LocatedResult) -> Iterator[Chart]:
    """Yield the charts for a `locate` result."""
    found = result.location
    if ratios := _ratios(found):
        highest = max(float(np.nanmax(line.y)) for line in ratios)
        yield LineChart(
            key="located-ratio", title="Each operator's own error, by layer", unit="bounds of rounding",
            note=text.LOCATED_RATIO, sql=_SQL.format(columns="side, kind, layer, ratio", result=result.id), lines=ratios,
            x_label="layer", y_scale=chart.LOG,
            bands=(Band(low=BEYOND, high=2 * max(BEYOND, highest), text="more than rounding"),) if highest > BEYOND else (),
            remark=f"a: {found.a}, b: {found.b}; step {found.step}, {found.num_sequences} sequences. {sentence(found)}",
        )  # fmt: skip
    if carried := tuple(_carried(found)):
        yield LineChart(
            key="located-carried", title="Mismatch accumulated up to a layer, by side", unit="share of mean d squared",
            note=text.LOCATED_CARRIED, sql=_SQL.format(columns="side, layer, operator, carried", result=result.id),
            lines=carried, x_label="layer",
        )  # fmt: skip
    if found.patches:
        best = sorted(found.patches, key=lambda each: -abs(each.removed))[:_MOST_BARS]
        sides = {taker: f"in {taker}" for taker in sorted({each.taker for each in best})}
        yield BarChart(
            key="located-patches", title="What each patch with the other side's code removes", unit="share of mean d squared",
            note=text.LOCATED_PATCHES, sql=f"FROM patches WHERE result = '{result.id}'", x_label="share removed",
            groups={
                name: tuple(
                    Bar(name=each.patch, value=each.removed, low=each.removed_low, high=each.removed_high)
                    for each in best
                    if each.taker == taker
                )
                for taker, name in sides.items()
            },
        )  # fmt: skip


def _ratios(found: Location) -> tuple[Line, ...]:
    """Return one line per operator kind and execution: the largest own error in each layer, divided by the rounding bound."""
    largest: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for each in found.operators:
        if each.layer is not None and 0.0 < each.ratio < np.inf:
            own = largest[each.kind, each.side]
            own[each.layer] = max(own.get(each.layer, 0.0), each.ratio)
    kinds = sorted(largest, key=lambda key: -max(largest[key].values()))[:_MOST_LINES]
    return tuple(
        Line(name=f"{kind} in {side}", x=np.array(sorted(own)), y=np.array([own[layer] for layer in sorted(own)]))
        for kind, side in kinds
        for own in (largest[kind, side],)
    )


def _carried(found: Location) -> Iterator[Line]:
    """Yield one line per execution: the cumulative share of the mismatch that the execution's operators account for."""
    layers = sorted({each.layer for each in found.layers if each.layer is not None})
    for side, name in (("a", found.a), ("b", found.b)):
        own = {each.layer: each.carried for each in found.layers if each.side == side}
        if any(own.values()):
            total = np.cumsum([own.get(layer, 0.0) for layer in layers])
            yield Line(name=f"{side} ({name})", x=np.array(layers), y=total)
