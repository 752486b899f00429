"""Report on one or several runs: every analysis, as an HTML page or as figures for papers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.errors import InvalidOption, option
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import whole_file
from ..trace.columns import parse_pair
from ..trace.source import Traces
from .contents import Report, report_of
from .subject import NUM_QUESTIONS, Subject, read_subject
from .targets import explained, local, refuse

if TYPE_CHECKING:
    from .paper.figure import PaperStyle


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
    """Write everything known about a run to a single HTML page, or export it as figures for papers.

    The report is about the first trace. Its charts show the other traces for comparison. For `pair` a:b, d = logprob(a)
    - logprob(b) in nats. `control` is a baseline run with the same seeds and one change (see attribute). `steps` (3:80,
    -10:, 2:200:2) selects steps in every trace. The verdict lists the questions that the trace cannot answer. `output`
    is the HTML file to write. An existing file is replaced only with `force`. A notebook displays the page, and
    printing the report prints the verdict.

    `png` and `svg` are folders for one image and one CSV file per figure. `pdf` is either a file (NAME.pdf) with one
    page per figure, whose CSV files go to a folder next to it, or a folder for one PDF per figure. `width` is in
    inches, or a name that sets column and text width: column (3.4 and 7 inches), aaai, acl, acm, iclr, icml, ieee,
    jmlr, nature or neurips. `font` must be installed. `title` adds a title to each figure.

    Raises FileThere, StorageError, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    given = [traces] if isinstance(traces, (str, os.PathLike)) else list(traces)
    if not given:
        raise InvalidOption("report: no trace given; pass at least one folder")
    kind = os.path.splitext(output or "")[1][1:].lower()
    if kind in ("png", "svg", "pdf"):
        raise InvalidOption(
            f"{output}: the page is HTML; write figures with {option(kind, 'FILE.pdf' if kind == 'pdf' else 'DIR')}",
            option="output",
        )
    pictures = {kind: place for kind, place in (("png", png), ("svg", svg), ("pdf", pdf)) if place is not None}
    files = [] if output is None else [local(output)]
    files += [target for kind, place in pictures.items() if _is_file(kind, target := local(place))]
    refuse(files, force)
    if pictures:
        from .paper.figure import paper_style  # deferred: importing matplotlib takes a second

        style = paper_style(width, font, title)
    subjects: list[Subject] = []
    with progress("analyzing runs", NUM_QUESTIONS * len(given)) as advance:
        for trace, name in zip(given, _names([os.fspath(trace) for trace in given]), strict=True):
            subjects.append(read_subject(trace, names, name, None if subjects else control, steps, advance))
    made = report_of(tuple(subjects))
    if output is not None:
        from .page.page import page  # deferred: importing Bokeh takes a second

        with explained(output), whole_file(local(output)) as path:
            path.write_text(page(made), encoding="utf-8", errors="replace")
    if pictures:
        _write_figures(made, pictures, style, force)
    return made


def _is_file(kind: str, place: str | os.PathLike[str]) -> bool:
    return kind == "pdf" and os.path.splitext(place)[1].lower() == ".pdf"


def _write_figures(
    made: Report, pictures: Mapping[str, str | os.PathLike[str]], style: PaperStyle, force: bool
) -> None:
    from .paper.files import figures_of, write_figures, write_pdf

    figures = figures_of(made.charts, made.run)
    folders: dict[Path, list[str]] = {}
    for kind, place in pictures.items():
        if _is_file(kind, place):
            write_pdf(figures, place, title=made.title, style=style, force=force)
        else:
            folders.setdefault(local(place), []).append(kind)
    for folder, kinds in folders.items():
        write_figures(figures, folder, *kinds, style=style, force=force)


def _names(urls: Sequence[str]) -> list[str]:
    parts = [url.rstrip("/").split("/") for url in urls]
    # A trace at RUN/trace is named after the folder RUN.
    least = 2 if all(part[-1] == "trace" and len(part) > 1 for part in parts) else 1
    for depth in range(least, max(least, max(len(part) for part in parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part)} ({place})" for place, part in enumerate(parts, 1)]
