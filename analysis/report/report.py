"""One or several runs as a report: everything that the analysis knows, to be drawn."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ... import __version__
from ...schemas.errors import InvalidOption
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import whole_file
from ..trace.database import Traces
from ..trace.pairs import parse_pair
from .contents import Contents
from .mismatch_charts import mismatch_charts
from .provenance import provenance
from .run_charts import constants, run_charts
from .subject import NUM_QUESTIONS, Subject, read_subject
from .targets import explained, local, refuse
from .verdict import verdict


@dataclass(frozen=True, kw_only=True)
class Report(Contents):
    """What is known of a run, ready to be written. In a notebook it shows itself."""

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
    pdf: str | os.PathLike[str] | None = None,
    control: str | os.PathLike[str] | None = None,
    pair: str = "train:rollout",
    force: bool = False,
    progress: Progress = no_progress,
) -> Report:
    """Put everything that is known of a run into one file of HTML, or into figures for papers.

    The first trace is the one that is reported; series of the others lie over its own. d = logprob(a) - logprob(b) of
    `pair`, nats. `control` is a run with the same seeds that differs in one thing (see attribute). What a trace cannot
    answer is said in the verdict, and the rest is answered. `output` is the file of HTML to write; `png` a folder for a
    picture and a CSV file of each figure; `pdf` a file with a page a figure, and a folder of CSV files beside it. What lies
    there is replaced with `force` alone. In a notebook what is returned shows itself.

    Raises FileThere, StorageError, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    given = [traces] if isinstance(traces, (str, os.PathLike)) else list(traces)
    if not given:
        raise InvalidOption("report: got no trace; name one folder or several")
    refuse([local(path) for path in (output, pdf) if path is not None], force)
    made = _report(_subjects(given, names, control, progress))
    if output is not None:
        with explained(output), whole_file(local(output)) as path:
            path.write_text(made.html(), encoding="utf-8", errors="replace")
    if png is not None or pdf is not None:
        _write_figures(made, png, pdf, force)
    return made


def _write_figures(
    made: Report, png: str | os.PathLike[str] | None, pdf: str | os.PathLike[str] | None, force: bool
) -> None:
    from .paper.files import figures_of, write_pdf, write_png

    figures = figures_of(made.charts, made.run)
    if png is not None:
        write_png(figures, png, force=force)
    if pdf is not None:
        write_pdf(figures, pdf, title=made.title, force=force)


def _report(subjects: tuple[Subject, ...]) -> Report:
    first = subjects[0]
    return Report(
        subjects=subjects,
        verdicts=tuple(verdict(subject) for subject in subjects),
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
    progress: Progress,
) -> tuple[Subject, ...]:
    names = _names([os.fspath(trace) for trace in given])
    found: list[Subject] = []
    with progress("asking the run", NUM_QUESTIONS * len(given)) as advance:
        for trace, name in zip(given, names, strict=True):
            found.append(read_subject(trace, pair, name, None if found else control, advance))
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
