"""Report on one or several runs: every analysis, as an HTML page, Markdown or figures for papers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...schemas.errors import InvalidOption, option
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import whole_file
from ..trace.columns import parse_pair
from ..trace.source import Traces
from .contents import Report, report_of
from .markdown import report_markdown
from .subject import NUM_QUESTIONS, Subject, read_subject
from .targets import explained, local, refuse


def report(
    traces: Traces,
    *,
    output: str | os.PathLike[str] | None = None,
    markdown: str | os.PathLike[str] | None = None,
    png: str | os.PathLike[str] | None = None,
    svg: str | os.PathLike[str] | None = None,
    pdf: str | os.PathLike[str] | None = None,
    width: str | float = "column",
    control: str | os.PathLike[str] | None = None,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    force: bool = False,
    progress: Progress = no_progress,
) -> Report:
    """Write everything known about a run to a single HTML page, Markdown, or figures for papers.

    The report is about the first trace. Its charts show the other traces for comparison. For `pair` a:b, d = logprob(a)
    - logprob(b) in nats. `control` is a baseline run with the same seeds and one change (see attribute). `steps` (3:80,
    -10:, 2:200:2) selects steps in every trace. The verdict lists the questions that the trace cannot answer. `output`
    is the HTML file to write. An existing file is replaced only with `force`. A notebook displays the page, and
    printing the report prints the verdict.

    `markdown` is a file for an issue or a chat (`-` prints it): the headline, the answers, the next commands and the
    series. `png`, `svg` and `pdf` are folders for one image and one CSV file per figure. `width` is a number of inches,
    or a name that sets the column width and the text width: column (3.4 and 7 inches), aaai, acl, acm, iclr, icml,
    ieee, jmlr, nature or neurips.

    Raises FileThere, StorageError, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    kind = os.path.splitext(output or "")[1][1:].lower()
    if kind in ("png", "svg", "pdf"):
        raise InvalidOption(f"{output}: the page is HTML; write figures with {option(kind, 'DIR')}", option="output")
    pictures: dict[Path, list[str]] = {}
    for kind, folder in (("png", png), ("svg", svg), ("pdf", pdf)):
        if folder is not None:
            if os.fspath(folder).lower().endswith(f".{kind}"):
                raise InvalidOption(f"{folder}: pass a folder for the figures, not a file", option=kind)
            pictures.setdefault(local(folder), []).append(kind)
    is_printed = markdown is not None and os.fspath(markdown) == "-"
    files = (output, None if is_printed else markdown)
    refuse([local(path) for path in files if path is not None], force)
    if pictures:
        from .paper.figure import paper_style  # deferred: importing matplotlib takes a second

        style = paper_style(width)
    made = analyzed(traces, control=control, pair=pair, steps=steps, progress=progress)
    if output is not None:
        from .page.page import page  # deferred: importing Bokeh takes a second

        _write_text(output, page(made))
    if is_printed:
        print(report_markdown(made), end="")
    elif markdown is not None:
        _write_text(markdown, report_markdown(made))
    if pictures:
        from .paper.files import figures_of, write_figures

        for folder, kinds in pictures.items():
            write_figures(figures_of(made.charts, made.run), folder, *kinds, style=style, force=force)
    return made


def analyzed(
    traces: Traces, *, control: str | os.PathLike[str] | None, pair: str, steps: str, progress: Progress
) -> Report:
    """Run every analysis, and return the report without writing it.

    Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    given = [traces] if isinstance(traces, (str, os.PathLike)) else list(traces)
    if not given:
        raise InvalidOption("report: no trace given; pass at least one folder")
    subjects: list[Subject] = []
    with progress("analyzing runs", NUM_QUESTIONS * len(given)) as advance:
        for trace, name in zip(given, _names([os.fspath(trace) for trace in given]), strict=True):
            subjects.append(read_subject(trace, names, name, None if subjects else control, steps, advance))
    return report_of(tuple(subjects))


def _write_text(place: str | os.PathLike[str], text: str) -> None:
    with explained(place), whole_file(local(place)) as path:
        path.write_text(text, encoding="utf-8", errors="replace")


def _names(urls: Sequence[str]) -> list[str]:
    parts = [url.rstrip("/").split("/") for url in urls]
    # A trace at RUN/trace is identified by RUN, so a short name must include at least the last two parts of the path.
    least = 2 if all(part[-1] == "trace" and len(part) > 1 for part in parts) else 1
    for depth in range(least, max(least, max(len(part) for part in parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part)} ({place})" for place, part in enumerate(parts, 1)]
