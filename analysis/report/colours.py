"""Colours of lines and bars, the same in the page and in figures for papers."""

from __future__ import annotations

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A00", "#888888")
"""Okabe and Ito's, the yellow darkened so that it is seen on white: told apart with any kind of colour vision."""

MARK = "#D55E00"
"""Of places at which something happened, and of the envelope over a density."""

BAND = "#009E73"
"""Of ranges that were published."""
