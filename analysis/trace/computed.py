"""Sums that are computed while a database is open: files in a temporary folder, since they may be larger than memory."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from ...schemas.layout import SUMS
from ...schemas.sums import SEQUENCE_SUMS, STEP_HISTOGRAMS
from ...schemas.tables import Table
from ...tracer.parquet_file import checked_writer
from .source import Pair, Source, made_of_metadata, sums_file

IN_FILES = (SEQUENCE_SUMS, STEP_HISTOGRAMS)
"""Kinds of sums that have a row or more a sequence, or many a step. The others are tables of DuckDB."""


RUN_OF_FOLDER = "tim_trace_run"
"""What DuckDB calls the column that it reads from the name of a run's folder."""


def run_folder(run: str) -> str:
    """Name of a folder of files of a run, which DuckDB reads as `_` and the run's name: some names alone mean NULL to it."""
    return f"{RUN_OF_FOLDER}=_{quote(run, safe='')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedFile:
    """Sums of one run."""

    run: str
    kind: str
    pair: Pair
    path: Path
    relative: str
    """Where a trace keeps it."""


class ComputedFiles:
    """The files of one database; they are removed with it."""

    def __init__(self) -> None:
        self.files: list[ComputedFile] = []
        self._folder: Path | None = None

    def of(self, kind: str) -> list[ComputedFile]:
        """The files of a kind."""
        return [file for file in self.files if file.kind == kind]

    @contextmanager
    def writing(self, source: Source, spec: Table, pair: Pair) -> Iterator[Callable[[pa.Table], None]]:
        """Give a function that adds rows to the sums of a run; each call's are a row group."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tim-trace-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / run_folder(source.run) / f"{spec.name}-{uuid.uuid4().hex}.parquet"
        path.parent.mkdir(exist_ok=True)
        schema = sums_schema(source, pair, spec)
        with checked_writer(path, f"{SUMS}/{spec.name}", schema, **SUMS_OPTIONS) as writer:
            yield lambda rows: writer.write(rows.cast(schema))
        assert writer.sealed.footer is not None
        relative = sums_file(spec.name, writer.sealed.footer)
        self.files.append(ComputedFile(run=source.run, kind=spec.name, pair=pair, path=path, relative=relative))

    def forget(self, pair: Pair | None = None) -> None:
        """Remove the files of a pair, or all."""
        gone = [file for file in self.files if pair in (None, file.pair)]
        self.files = [file for file in self.files if file not in gone]
        for file in gone:
            file.path.unlink(missing_ok=True)


SUMS_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["pass_a", "pass_b"]}
"""How sums are written: options of pyarrow's ParquetWriter."""


def sums_schema(source: Source, pair: Pair, spec: Table) -> pa.Schema:
    """The schema of sums of all sealed rows of a trace, which says what they are made of."""
    return spec.schema.with_metadata(made_of_metadata(spec.name, pair, source.segments))
