"""A density as a figure."""

from __future__ import annotations

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from ..chart import Density
from ..colours import MARK
from .plain import LEFT, plain


def density(one: Density) -> figure:
    x, y = one.x_edges, one.y_edges
    plot = figure(
        name=one.key, height=360, sizing_mode="stretch_width", x_range=(float(x[0]), float(x[-1])),
        y_range=(float(y[0]), float(y[-1])), toolbar_location=None, tools="", x_axis_label=one.x_label,
        y_axis_label=one.y_label, min_border_left=LEFT,
    )  # fmt: skip
    shown = _shown(one.counts)
    source = ColumnDataSource({"image": [shown], "counts": [one.counts.astype(np.float32)]}, name=f"{one.key}/0")
    highest = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    colours = LinearColorMapper(
        palette=Cividis256, low=0.0, high=max(highest, 0.3), nan_color="rgba(0, 0, 0, 0)", name="counts"
    )
    cells = plot.image(
        "image", x=float(x[0]), y=float(y[0]), dw=float(x[-1] - x[0]), dh=float(y[-1] - y[0]), source=source,
        color_mapper=colours,
    )  # fmt: skip
    for line in one.curves:
        plot.line(line.x, line.y, color=MARK, line_width=1.6, line_dash="dashed", legend_label=line.name)
    plot.add_tools(
        HoverTool(
            renderers=[cells],
            tooltips=[(one.x_label, "$x{0.000}"), ("d", "$y{0.00000} nats"), ("tokens", "@counts{0,0}")],
        )
    )
    bar = cells.construct_color_bar(
        width=10, title="tokens", ticker=FixedTicker(ticks=list(range(int(highest) + 1))), background_fill_alpha=0,
        major_label_overrides={power: f"{10**power:,}" for power in range(int(highest) + 1)},
    )  # fmt: skip
    plot.add_layout(bar, "right")
    return plain(plot)


def _shown(counts: np.ndarray) -> np.ndarray:
    """Counts as the density colours them: decimal logarithms, NaN where there is none."""
    with np.errstate(divide="ignore"):
        return np.where(counts > 0, np.log10(np.maximum(counts, 1)), np.nan).astype(np.float32)
