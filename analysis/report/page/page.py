"""Render a report as one HTML file that makes no network requests. All text is escaped on insertion."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shlex
from functools import cache
from importlib.resources import files
from itertools import chain

import numpy as np
from bokeh.document import Document
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from ...dynamics.text import summary_sentences
from ...token_samples.token_samples import FINITE, TokenSample
from ..answers import QUESTIONS, SIGNS
from ..chart import COLOURS, LineChart
from ..contents import Report
from ..mismatch_charts import grouped
from ..run_charts import SERIES, WORDS
from ..subject import Subject
from .figures import THEME, single, stacked

_WORDS = re.compile(r"(?<![\w|/-])(" + "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True)) + r")(?![\w/-])")


def page(report: Report) -> str:
    first = report.subjects[0]
    drawn = chain([stacked(report.run)], ([single(one)] for one in report.mismatch if not one.is_empty))
    figures = {"groups": [_embedded(plots) for plots in drawn if plots]}
    return _template().render(
        report=report, first=first, colours=COLOURS, series=SERIES, signs=SIGNS, names=_names(report.run), theme=THEME,
        questions={code: question for code, (question, *_) in QUESTIONS.items()}, groups=grouped(report.mismatch),
        steps=[int(step) for step in first.steps],
        style=Markup(_own("report.css")),  # part of this package, so it needs no escaping
        script=Markup(_own("report.js")),
        packs={
            "bokeh": pack_text(bokeh_script()), "figures": pack(figures), "sequences": pack(sequences_of(first)),
        },
    )  # fmt: skip


@cache
def bokeh_script() -> str:
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def _embedded(plots: list[figure]) -> dict[str, object]:
    document, name = Document(), plots[0].name
    with document.models.freeze():  # otherwise Bokeh collects all models again after each figure
        for plot in plots:
            document.add_root(plot)
    roots = {plot.id: element_of(plot.name) for plot in plots}
    return {
        "docs": {name: document.to_json(deferred=False)},
        "items": [{"docid": name, "roots": roots, "root_ids": list(roots)}],
    }


def element_of(key: str) -> str:
    return f"plot-{key}"


def _names(charts: tuple[LineChart, ...]) -> list[tuple[str, bool]]:
    """Return the name of each distinct line, and whether the line is secondary. A line's index in the list selects its
    colour."""
    longest: dict[str, bool] = {}
    for one in charts:
        for line in one.lines:
            longest.setdefault(line.name, line.is_side)
    return list(longest.items())


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters = {"number": _number, "sorted_by": _sorted_by, "shell": shlex.quote, "explained": explained}
    environment.filters.update(filters)
    environment.globals.update(term=term, element_of=element_of, summary_sentences=summary_sentences)
    return environment.from_string(_own("report.html"))


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return ""
    return "NaN" if math.isnan(value) else f"{value:.{digits}g}"


def _sorted_by(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return str(value) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def explained(text: str) -> Markup:
    """Escape text for HTML, and attach a hover note to the first occurrence of each glossary term."""
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
    return Markup('<span class="term" tabindex="0">{}<span class="tip" role="tooltip">{}</span></span>').format(
        shown, WORDS[word]
    )


# --- data for the browser --------------------------------------------------------------------------------------------


def pack(value: object) -> str:
    return pack_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def pack_text(text: str) -> str:
    """Compress text with gzip and encode it as base64. The same text always gives the same result."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)).decode("ascii")


def floats(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode("ascii")


def sequences_of(subject: Subject) -> dict[str, object]:
    excerpts, spread = subject.excerpts, subject.spread
    return {
        "pair": list(subject.pair),
        "passes": list(excerpts.passes),
        # The |d| (nats) at which the colour scale saturates: the run's 99.9% quantile, but at least 0.001.
        "full": max(float(spread.d_edges[-1]), 1e-3) if spread is not None else 1.0,
        "sequences": [_sequence(one) for one in excerpts.sequences],
    }


def _sequence(one: TokenSample) -> dict[str, object]:
    holes = np.any([np.full(len(one.ids), FINITE), *one.state.values()], axis=0)
    return {
        "step": one.step, "seq_id": one.seq_id, "facts": facts_of(one), "num_tokens": one.num_tokens,
        "first_token": one.first_token, "num_prompt_tokens": one.num_prompt_tokens or 0,
        "prompt": [[token, text] for token, text in one.prompt], "ids": one.ids.tolist(), "texts": list(one.texts),
        "mask": [int(kept) for kept in one.mask], "advantage": None if one.advantage is None or not math.isfinite(one.advantage) else one.advantage,
        "logprobs": {name: floats(values) for name, values in one.logprobs.items()},
        "states": {name: values.tolist() for name, values in one.state.items()}, "holes": [int(hole) for hole in holes],
    } | {
        name: floats(values)
        for name, values in (("entropy", one.entropy), ("advantages", one.advantages))
        if values is not None
    }  # fmt: skip


def facts_of(one: TokenSample) -> str:
    facts = (
        ("reward", one.reward, ""), ("advantage", one.advantage, ""), ("largest |d|", one.max_abs_d, ""),
        ("sum of d", one.sum_d, " nats"), ("policy version", one.policy_version, ""), ("finish reason", one.finish_reason, ""),
        ("group", one.group_id, ""),
    )  # fmt: skip
    told = [
        f"{name} {_number(value) if isinstance(value, float) else value}{unit}"
        for name, value, unit in facts
        if value is not None
    ]
    return ", ".join([f"{one.num_tokens:,} tokens", *told])
