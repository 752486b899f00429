"""Figures for papers as files, each with its numbers as CSV. The same charts give the same bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from ....tracer.whole_file import whole_file, write_whole
from ...rows import to_csv
from ..chart import Chart, Lines
from ..targets import explained, local, refuse
from .cover import cover
from .figures import draw
from .stack import stack_of
from .style import DPI, paper_style
from .values import rows_of


def figures_of(charts: Sequence[Chart], series: Sequence[Lines]) -> tuple[Chart, ...]:
    """The charts of a report, `report.charts`, after an overview of its series, `report.run`."""
    return (*((stack_of(series),) if series else ()), *(one for one in charts if not one.is_empty))


def write_png(charts: Sequence[Chart], folder: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
    """Write each chart as KEY.png, 200 dots an inch, and KEY.csv into a folder, and return their paths.

    Raises FileThere when one of these files is there already, unless `force` replaces it; StorageError.
    """
    target = local(folder)
    images = [target / f"{one.key}.png" for one in charts]
    tables = [target / f"{one.key}.csv" for one in charts]
    refuse([*images, *tables], force)
    with explained(folder):
        for one, image, table in zip(charts, images, tables, strict=True):
            with whole_file(image) as temporary:
                _save_png(draw(one), temporary)
            _write_csv(one, table)
    return sorted([*images, *tables])


def write_pdf(
    charts: Sequence[Chart], path: str | os.PathLike[str], *, title: str = "", force: bool = False
) -> list[Path]:
    """Write a PDF of vectors, a page a chart in its own size after a page with the title and the list of the charts, and
    their numbers as KEY.csv into a folder beside it (figures.pdf: figures-data); return the paths, the PDF first.

    Raises FileThere when one of these files is there already, unless `force` replaces it; StorageError.
    """
    target = local(path)
    folder = target.with_name(f"{target.stem}-data")
    tables = [folder / f"{one.key}.csv" for one in charts]
    refuse([target, *tables], force)
    with explained(path):
        with whole_file(target) as temporary:
            _save_pdf(charts, temporary, title, folder.name)
        for one, table in zip(charts, tables, strict=True):
            _write_csv(one, table)
    return [target, *tables]


def _save_png(figure: Figure, path: Path) -> None:
    with paper_style():
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


def _save_pdf(charts: Sequence[Chart], path: Path, title: str, data: str) -> None:
    about = {"Title": title or None, "Creator": "tim-trace", "Producer": None, "CreationDate": None}
    with paper_style(), PdfPages(path, metadata=about) as pages:
        pages.savefig(cover(charts, title, data))
        for one in charts:
            pages.savefig(draw(one))


def _write_csv(one: Chart, path: Path) -> None:
    text = "".join(f"{line}\n" for line in to_csv(rows_of(one)))
    # Half a pair of UTF-16, as a damaged name may hold it, is no UTF-8.
    write_whole(path, text.encode("utf-8", "backslashreplace"))
