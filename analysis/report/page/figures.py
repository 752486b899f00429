"""Charts as figures of Bokeh, which draws them in the reader's browser.

Bokeh, because its script comes with the package and can be inlined (1.3 MB, BSD-3, kept since 2013), because it draws on a
canvas, and because figures of one document can share an axis and a zoom. Colours are those of Okabe and Ito, which are told
apart with any kind of colour vision; text and grids take theirs from the page when it is shown.
"""

from __future__ import annotations

from bokeh.plotting import figure

from ..chart import Chart, Density, Histogram, Lines, Shares
from .density import density
from .histogram import histogram
from .lines import lines, stacked
from .shares import shares

__all__ = ["single", "stacked"]


def single(one: Chart) -> figure:
    """A figure that stands for itself."""
    if isinstance(one, Density):
        return density(one)
    if isinstance(one, Histogram):
        return histogram(one)
    if isinstance(one, Shares):
        return shares(one)
    assert isinstance(one, Lines)
    return lines(one)
