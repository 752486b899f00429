"""A report's figures as matplotlib objects, for editing or combining with other figures."""

from __future__ import annotations

import os

from matplotlib.figure import Figure

from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..trace.source import Traces
from .paper.figure import draw, paper_style
from .paper.files import figures_of
from .report import analyzed


def figures(
    traces: Traces,
    *,
    width: str | float = "column",
    control: str | os.PathLike[str] | None = None,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> dict[str, Figure]:
    """Return the figures that `report --png` writes, as matplotlib Figures keyed by file name.

    `run` shows all series by step. The others (`k3`, `reward`, `d-by-probability`, ...) show one chart each. The
    figures are not managed by pyplot: change them through `figure.axes`, and write them with `figure.savefig(path)`.
    The options are those of `report`.

    Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    style = paper_style(width)
    made = analyzed(traces, control=control, pair=pair, steps=steps, progress=progress)
    return {chart.key: draw(chart, style) for chart in figures_of(made.charts, made.run)}
