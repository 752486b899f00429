"""Named values as bars."""

from __future__ import annotations

import math

from bokeh.models import ColumnDataSource, HoverTool, Range1d, Whisker
from bokeh.plotting import figure

from ..chart import Shares
from ..colours import COLOURS
from .plain import plain


def shares(one: Shares) -> figure:
    names = list(dict.fromkeys(share.name for group in one.groups.values() for share in group))[::-1]
    plot = figure(
        name=one.key, height=90 + len(names) * (12 + 10 * len(one.groups)), sizing_mode="stretch_width", y_range=names,
        x_range=_ends(one),
        toolbar_location=None, tools="", x_axis_label=one.x_label,
    )  # fmt: skip
    width = 0.8 / len(one.groups)
    for place, (group, shares) in enumerate(one.groups.items()):
        offset = width * (place - (len(one.groups) - 1) / 2)
        source = ColumnDataSource(
            {
                "y": [(share.name, offset) for share in shares], "value": [share.value for share in shares],
                "low": [_or(share.low, share.value) for share in shares],
                "high": [_or(share.high, share.value) for share in shares], "text": [share.text for share in shares],
                "name": [share.name for share in shares],
            },
            name=f"{one.key}/{place}",
        )  # fmt: skip
        bars = plot.hbar(
            y="y", right="value", height=width * 0.86, source=source, color=COLOURS[place], fill_alpha=0.75, name=group,
            **({"legend_label": group} if len(one.groups) > 1 else {}),
        )  # fmt: skip
        if any(share.low is not None for share in shares):
            plot.add_layout(
                Whisker(base="y", lower="low", upper="high", dimension="width", source=source, line_color="#777777")
            )
        plot.add_tools(
            HoverTool(
                renderers=[bars],
                tooltips=[
                    ("", "@name"),
                    (group, "@value{0.[00000]} (@low{0.[0000]} to @high{0.[0000]})"),
                    ("", "@text"),
                ],
            )
        )
    return plain(plot)


def _ends(one: Shares) -> Range1d:
    """From the least to the largest end of a bar or an interval, and 0: a range of Bokeh's own sees the bars alone."""
    each = [share for group in one.groups.values() for share in group]
    ends = [0.0] + [end for share in each for end in (share.value, share.low, share.high) if end is not None]
    known = [end for end in ends if math.isfinite(end)]
    room = 0.05 * (max(known) - min(known)) or 1.0
    return Range1d(min(known) - room, max(known) + room)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
