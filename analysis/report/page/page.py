"""A report as one file of HTML that opens from disk: script, style and data are inside of it."""

from __future__ import annotations

import math
import re
import shlex
from functools import cache
from importlib.resources import files
from typing import Any

from bokeh.document import Document
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ...dynamics.text import summary_sentences
from ..chart import COLOURS, LineChart
from ..mismatch_charts import grouped
from ..report import Report
from ..terms import SERIES, WORDS
from ..text import QUESTIONS
from .data import frames_of, pack, pack_text, sequences_of
from .figures import THEME, single, stacked

_WORDS = re.compile(r"(?<![\w|/-])(" + "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True)) + r")(?![\w/-])")


def page(report: Report) -> str:
    """Write a report as HTML. Every text is escaped where it is put in; nothing is fetched when it is opened."""
    groups = [
        _embedded(stacked(report.run)),
        *(_embedded([single(one)]) for one in report.mismatch if not one.is_empty),
    ]
    first = report.subjects[0]
    figures = {
        "groups": [group for group in groups if group["items"][0]["roots"]],
        "frames": frames_of(report.mismatch),
    }
    return str(
        _template().render(
            report=report,
            first=first,
            element_of=element_of,
            colours=COLOURS,
            series=SERIES,
            questions=QUESTIONS,
            names=_names(report.run),
            theme=THEME,
            groups=grouped(report.mismatch),
            steps=[int(step) for step in first.steps],
            style=Markup(_own("report.css")),  # our own file
            script=Markup(_own("report.js")),
            packs={
                "bokeh": pack_text(bokeh_script()),
                "figures": pack(figures),
                "sequences": pack(sequences_of(first)),
            },
        )
    )


@cache
def bokeh_script() -> str:
    """BokehJS, as its package carries it, with its licence's head."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def _embedded(plots: list[Any]) -> dict[str, Any]:
    """Figures of one document, and the element that each is put into."""
    document = Document()
    for plot in plots:
        document.add_root(plot)
    name = plots[0].name if plots else ""
    roots = {plot.id: element_of(plot.name) for plot in plots}
    return {
        "docs": {name: document.to_json(deferred=False)},
        "items": [{"docid": name, "roots": roots, "root_ids": list(roots)}],
    }


def element_of(key: str) -> str:
    """The id of the element that a chart is drawn into."""
    return f"plot-{key}"


def _names(charts: tuple[LineChart, ...]) -> list[tuple[str, bool]]:
    """The lines that any stacked figure has, in the order of their colours, and whether each is a side line."""
    longest: dict[str, bool] = {}
    for one in charts:
        for line in one.lines:
            longest.setdefault(line.name, line.is_side)
    return list(longest.items())


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _number
    environment.filters["sorted_by"] = _sorted_by
    environment.filters["shell"] = shlex.quote
    environment.filters["explained"] = explained
    environment.globals["term"] = term
    environment.globals["summary_sentences"] = summary_sentences
    return environment.from_string(_own("report.html"))


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return ""
    return "NaN" if math.isnan(value) else f"{value:.{digits}g}"


def _sorted_by(value: float | None) -> str:
    """A number as a browser reads it; empty, which comes last, where there is none."""
    if value is None or math.isnan(value):
        return ""
    return str(value) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def explained(text: str) -> Markup:
    """A text, escaped, in which the first use of each word of `terms.WORDS` shows its note."""
    seen: set[str] = set()
    parts: list[Markup] = []
    end = 0
    for match in _WORDS.finditer(text):
        word = match[1]
        if word not in seen:
            seen.add(word)
            parts += [escape(text[end : match.start()]), term(word, word)]
            end = match.end()
    return Markup("").join([*parts, escape(text[end:])])


def term(word: str, shown: str) -> Markup:
    """A word with its note, which a mouse and a keyboard reach."""
    return Markup('<span class="term" tabindex="0">{}<span class="tip" role="tooltip">{}</span></span>').format(
        shown, WORDS[word]
    )
