"""The first page of a PDF: of which run its figures are, and which page has which."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..chart import Chart
from .style import PAGE
from .text import plain, wrapped

_ROW = 0.17
"""Inches a line."""


def cover(charts: Sequence[Chart], title: str, data: str) -> Figure:
    """A page with the title, and below it a line a figure: its page, its title and its file in the folder `data`."""
    heading = wrapped(title or "Figures", 80, 4)
    height = 0.6 + _ROW * (len(charts) + 2 + 1.5 * (heading.count("\n") + 1))
    figure = Figure(figsize=(PAGE, height))
    lines = [
        (f"{page}", plain(one.title, 64), plain(f"{data}/{one.key}.csv", 48)) for page, one in enumerate(charts, 2)
    ]
    at = height - 0.3
    figure.text(0.3 / PAGE, at / height, heading, fontsize=10, va="top", linespacing=1.2)
    at -= _ROW * (1.5 * (heading.count("\n") + 1) + 0.5)
    for line in [("page", "figure", "its numbers"), *lines]:
        for left, text in zip((0.3, 0.75, 4.3), line, strict=True):
            figure.text(left / PAGE, at / height, text, fontsize=7, va="top")
        at -= _ROW
    return figure
