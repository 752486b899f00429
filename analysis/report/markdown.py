"""Render a report's verdict as Markdown."""

from __future__ import annotations

import numpy as np

from ..facts.recorded import interval_text
from ..markdown import escaped, fenced, table_lines
from ..rows import printable_lines
from .answers import QUESTIONS, SIGNS
from .chart import LineChart
from .contents import Report

_MOST_SERIES = 8
_SERIES = ("series", "first", "last", "smallest", "largest", "changes at step")


def report_markdown(made: Report) -> str:
    """Return the headline, the five answers, the next commands and the main series, with values rounded to four
    digits."""
    first, verdict = made.subjects[0], made.verdicts[0]
    names = [escaped(subject.name) for subject in made.subjects]
    rows = []
    for place, (question, *_) in enumerate(QUESTIONS.values()):
        answers = [each.answers[place] for each in made.verdicts]
        cells = [f"{SIGNS[one.severity]} {escaped(one.short)}" for one in answers]
        rows.append([question, *cells, *([escaped(answers[0].figure)] if len(answers) == 1 else [])])
    columns = ["answer", "figure"] if len(names) == 1 else names
    lines = [f"### tim-trace: {', '.join(names)}", "", f"**{escaped(verdict.headline)}**", ""]
    lines += [*table_lines(["question", *columns], rows), "", "Next:", ""]
    lines += fenced(printable_lines("\n".join(str(each) if each.command else f"# {each}" for each in verdict.next)))
    series = [row for chart in made.run[:_MOST_SERIES] if (row := _numbers(chart, first.name))]
    if series:
        of = f" of {names[0]}" if len(names) > 1 else ""
        lines += ["", f"Series by step{of}:", "", *table_lines(_SERIES, series)]
    return "\n".join([*lines, ""])


def _numbers(chart: LineChart, run: str) -> list[str]:
    values = next((line.y[np.isfinite(line.y)] for line in chart.lines if line.name == run), np.empty(0))
    if not len(values):
        return []
    told = [f"{value:.4g}" for value in (values[0], values[-1], values.min(), values.max())]
    changes = [f"{mark.x:g}{interval_text(int(mark.low), int(mark.high))}" for mark in chart.marks]
    return [escaped(chart.title + (f" ({chart.unit})" if chart.unit else "")), *told, ", ".join(changes)]
