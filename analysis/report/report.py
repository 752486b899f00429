"""One or several runs as a report: everything that the analysis knows, to be drawn."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...schemas.errors import InvalidOption
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import whole_file
from ..trace.database import Traces
from ..trace.pairs import parse_pair
from .answers import RunSummary, summarise
from .chart import Chart, LineChart
from .mismatch_charts import mismatch_charts
from .provenance import Provenance, provenance
from .run_charts import constants, run_charts
from .subject import NUM_QUESTIONS, Subject, read_subject
from .targets import explained, local, refuse

if TYPE_CHECKING:
    from .paper.figure import PaperStyle


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is known of a run, ready to be written. In a notebook it shows itself."""

    subjects: tuple[Subject, ...]
    """The runs; the first is the one that is reported, the others stand beside it."""
    verdicts: tuple[RunSummary, ...]
    """One a run."""
    run: tuple[LineChart, ...]
    """Charts of the series by step."""
    constants: dict[str, float]
    """Series of the first run that never move -> their value."""
    mismatch: tuple[Chart, ...]
    """Charts of the first run's mismatch."""
    provenance: tuple[Provenance, ...]
    """One a run."""
    made_with: str
    """Version of tim-trace."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Every chart, in order."""
        return (*self.run, *self.mismatch)

    @property
    def title(self) -> str:
        """The run and its verdict in a line."""
        return f"{self.subjects[0].name}: {self.verdicts[0].sentence}"

    def html(self) -> str:
        """The report as one self-contained file of HTML."""
        from .page.page import page  # Bokeh takes a second to load

        return page(self)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style and script stay there."""
        return f'<iframe srcdoc="{html.escape(self.html())}" width="100%" height="900" style="border:0"></iframe>'


def report(
    traces: Traces,
    *,
    output: str | os.PathLike[str] | None = None,
    png: str | os.PathLike[str] | None = None,
    svg: str | os.PathLike[str] | None = None,
    pdf: str | os.PathLike[str] | None = None,
    width: str | float = "column",
    font: str = "DejaVu Sans",
    title: bool = False,
    control: str | os.PathLike[str] | None = None,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    force: bool = False,
    progress: Progress = no_progress,
) -> Report:
    """Put everything that is known of a run into one file of HTML, or into figures for papers.

    The first trace is the one that is reported; series of the others lie over its own. d = logprob(a) - logprob(b) of
    `pair`, nats. `control` is a run with the same seeds that differs in one thing (see attribute). `steps` (3:80,
    -10:, 2:200:2) takes a part of each of them. What a trace cannot
    answer is said in the verdict, and the rest is answered. `output` is the file of HTML to write. What lies there is replaced
    with `force` alone. In a notebook what is returned shows itself.

    Figures for papers: `png` and `svg` are folders for a picture and a CSV file of each figure; `pdf` is a file (NAME.pdf) with
    a page a figure and a folder of CSV files beside it, or a folder for one PDF a figure. `width` is inches, or a name that
    gives single figures the width of a column and the overview that of the text: column (3.4 and 7), aaai, acl, acm, iclr,
    icml, ieee, jmlr, nature or neurips. `font` is one of this machine. A figure has a title above it with `title` alone.

    Raises FileThere, StorageError, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    given = [traces] if isinstance(traces, (str, os.PathLike)) else list(traces)
    if not given:
        raise InvalidOption("report: got no trace; name one folder or several")
    pdf_file = pdf if pdf is not None and _is_file(pdf) else None
    targets = {path: local(path) for path in (output, png, svg, pdf) if path is not None}
    refuse([targets[path] for path in (output, pdf_file) if path is not None], force)
    style = _style(width, font, title) if any(path is not None for path in (png, svg, pdf)) else None
    made = _report(_subjects(given, names, control, steps, progress))
    if output is not None:
        with explained(output), whole_file(local(output)) as path:
            path.write_text(made.html(), encoding="utf-8", errors="replace")
    if style is not None:
        _write_figures(made, {"png": png, "svg": svg, "pdf": pdf}, style, force)
    return made


def _style(width: str | float, font: str, title: bool) -> PaperStyle:
    from .paper.figure import paper_style  # matplotlib takes a second to load

    return paper_style(width, font, title)


def _is_file(pdf: str | os.PathLike[str]) -> bool:
    return os.path.splitext(pdf)[1].lower() == ".pdf"


def _write_figures(
    made: Report, places: Mapping[str, str | os.PathLike[str] | None], style: PaperStyle, force: bool
) -> None:
    from .paper.files import figures_of, write_figures, write_pdf

    figures = figures_of(made.charts, made.run)
    folders: dict[Path, list[str]] = {}
    for kind, place in places.items():
        if place is not None and kind == "pdf" and _is_file(place):
            write_pdf(figures, place, title=made.title, style=style, force=force)
        elif place is not None:
            folders.setdefault(local(place), []).append(kind)
    for folder, kinds in folders.items():
        write_figures(figures, folder, *kinds, style=style, force=force)


def _report(subjects: tuple[Subject, ...]) -> Report:
    first = subjects[0]
    return Report(
        subjects=subjects,
        verdicts=tuple(summarise(subject) for subject in subjects),
        run=tuple(run_charts(subjects)),
        constants=constants(first),
        mismatch=tuple(mismatch_charts(first)),
        provenance=tuple(provenance(subject) for subject in subjects),
        made_with=__version__,
    )


def _subjects(
    given: Sequence[str | os.PathLike[str]],
    pair: tuple[str, str],
    control: str | os.PathLike[str] | None,
    steps: str,
    progress: Progress,
) -> tuple[Subject, ...]:
    names = _names([os.fspath(trace) for trace in given])
    found: list[Subject] = []
    with progress("asking the run", NUM_QUESTIONS * len(given)) as advance:
        for trace, name in zip(given, names, strict=True):
            found.append(read_subject(trace, pair, name, None if found else control, steps, advance))
    return tuple(found)


def _names(urls: Sequence[str]) -> list[str]:
    """As much of the end of each path as tells it from the others."""
    parts = [url.rstrip("/").split("/") for url in urls]
    # A folder of a run that holds its trace beside other things says nothing by the trace's own name.
    least = 2 if all(part[-1] == "trace" and len(part) > 1 for part in parts) else 1
    for depth in range(least, max(least, max(len(part) for part in parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part)} ({place})" for place, part in enumerate(parts, 1)]
