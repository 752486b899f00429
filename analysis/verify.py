from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.parquet import ParquetFile

from ..schemas.checksums import SealedFile, whole_hash
from ..schemas.errors import DamagedTrace, TimTraceError
from ..schemas.layout import DENSE, FORMAT_VERSION, LOCATE, PASSES, SUMS, TABLES, TOKENIZER, WEIGHTS, Segment
from ..schemas.results import Result
from ..tracer.dense_group import is_sealed, open_dense, sealed_root
from ..tracer.index import passed_over
from ..tracer.journal import DENSE_TABLE, read_journal
from ..tracer.liveness import journaled_segments
from ..tracer.located import read_result, result_ids, result_path
from ..tracer.progress import Progress, no_progress
from ..tracer.snapshot import torn_record
from ..tracer.store import Store, first_line
from ..tracer.verified_file import FileCursor, VerifiedFile
from ..tracer.weights.checkpoints import open_weights
from ..tracer.weights.reader import WeightReader
from .conformance import conformance
from .rows import Form, Rows, counted, printable, to_text
from .trace.source import Source, open_source
from .views import open_database

COLUMNS = ("folder", "num_files", "num_bytes", "num_damaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Result):
    _text = "tim_trace.analysis.verify:verification_text"

    trace: str
    folders: Rows
    """One row per folder: files read, bytes read, and damaged files."""
    damaged: tuple[str, ...]
    """One sentence per damaged or missing file."""
    ignored: tuple[str, ...]
    """One sentence per file that does not belong to the trace."""
    num_unchecked: int = 0
    """Number of files that another program wrote without a checksum. Damage in them cannot be detected."""
    deviations: Rows | None = None
    """Deviations from the format (COLUMNS of analysis.conformance), or None if they were not checked."""

    @property
    def is_whole(self) -> bool:
        return not self.damaged


def verify(trace: str | os.PathLike[str], *, format: bool = False, progress: Progress = no_progress) -> Verification:
    """Verify every byte, row count, chunk and version of a trace against its checksums.

    `format` also checks files, fields, columns and rows against the format, for traces written by other programs. Other
    functions check only what they read. Raises TraceNotFound, NewerTrace, or DamagedTrace if the trace cannot be opened
    (with `format`, this is reported as a deviation instead).
    """
    try:
        source = open_source(os.fspath(trace))
    except DamagedTrace as error:
        if not format:
            raise
        deviations = conformance(Store(os.fspath(trace)), None)
        return Verification(
            trace=os.fspath(trace), folders=Rows(COLUMNS, []), damaged=(str(error),), ignored=(), deviations=deviations
        )
    found = _Verifier(source)
    with progress("verifying", found.num_bytes) as advance:
        for num_bytes in found.run():
            advance(num_bytes)
    return Verification(
        trace=os.fspath(trace),
        folders=Rows(COLUMNS, [(name, *counts) for name, counts in found.counts.items() if counts[0]]),
        damaged=tuple(dict.fromkeys((*source.damaged, *found.damaged))),
        ignored=(*source.ignored, *found.ignored),
        num_unchecked=sum(not record.hash for record in source.accounted.values()),
        deviations=conformance(source.store, open_database(source)) if format else None,
    )


def verification_text(found: Verification, width: int | None = None) -> str:
    lines = [to_text(found.folders, width)]
    if found.is_whole and not found.num_unchecked:
        num_files = sum(row["num_files"] for row in found.folders.dicts())
        lines.append(f"intact: every byte of {counted(num_files, 'file')} matches its checksum")
    lines += [f"damaged: {printable(sentence)}" for sentence in found.damaged]
    lines += [f"ignored: {printable(sentence)}" for sentence in found.ignored]
    if found.num_unchecked:
        files = counted(found.num_unchecked, "file has", "files have")
        lines.append(f"{files} no checksums, so damage in them cannot be detected")
    if found.deviations is not None:
        deviations = [_deviation_text(**row) for row in found.deviations.dicts()]
        lines += deviations or [f"conforms to trace format {FORMAT_VERSION}"]
    return "\n".join(lines)


def _deviation_text(where: str, field: str, code: str, expected: str, found: str, num_rows: int | None) -> str:
    place = ": ".join(filter(None, (where, field)))
    wanted = f", expected {expected}" if expected else ""
    actual = f", found {found}" if found else ""
    rows = "" if num_rows is None else f" ({counted(num_rows, 'row')}, e.g. {found})"
    return printable(f"format: {place}: {code.replace('_', ' ')}{wanted}{rows or actual}")


VERIFICATION_FORM: Form = {Verification: {"is_whole": Verification.is_whole}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    folder: str
    name: str
    num_bytes: int
    read: Callable[[], object]
    of_parts: Callable[[], list[str]] = list


class _Verifier:
    def __init__(self, source: Source):
        self.source, self.store = source, source.store
        folders = (*TABLES, PASSES, DENSE, WEIGHTS, SUMS, TOKENIZER, LOCATE)
        self.counts = {name: [0] * (len(COLUMNS) - 1) for name in folders}
        self.damaged: list[str] = []
        self.ignored: list[str] = []
        self._records = self.source.accounted

    @property
    def num_bytes(self) -> int:
        return sum(self.store.size(folder) for folder in (*TABLES, DENSE, WEIGHTS, SUMS, TOKENIZER, LOCATE))

    def run(self) -> Iterator[int]:
        for entry in self.parts():
            if isinstance(entry, str):
                self.damaged.append(entry)
            else:
                yield self._read(entry)
        self._ask_for_groups()

    def parts(self) -> Iterator[_Part | str]:
        for table in TABLES:
            for entry in self.source.files[table]:
                yield self._file(table, entry.relative, entry.file)
        sums = {file.relative: file for pairs in self.source.sums.values() for file in pairs.values()}
        for relative, file in sums.items():
            yield self._file(SUMS, relative, file)
        if outdated := [name for name in self.store.files(SUMS) if f"{SUMS}/{name}" not in sums]:
            self.ignored.append(
                f"{self.store.shown(SUMS)}: {len(outdated)} files do not match the trace and will be recomputed when needed: "
                f"{', '.join(outdated)}"
            )
        self.ignored += [
            f"{self.store.shown(relative)} is outdated or damaged; it only duplicates other files and will be "
            "rewritten when sums are next stored"
            for relative in passed_over(self.store)
        ]
        for relative, record in self._records.items():
            if (folder := relative.partition("/")[0]) in (TOKENIZER, PASSES):
                yield self._document(folder, relative, record)
        yield from self._groups()
        yield from self._weights()
        yield from self._located()

    def _read(self, part: _Part) -> int:
        damage: list[str] = []
        try:
            part.read()
        except TimTraceError as error:
            damage = [str(error), *part.of_parts()]
        except Exception as error:  # libraries raise arbitrary errors on damaged bytes
            damage = [f"{self.store.shown(part.name)}: {first_line(error)}. Restore it from a backup", *part.of_parts()]
        added = (1, part.num_bytes, bool(damage))
        self.counts[part.folder] = [count + more for count, more in zip(self.counts[part.folder], added, strict=True)]
        self.damaged += damage
        return part.num_bytes

    def _file(self, folder: str, relative: str, file: VerifiedFile) -> _Part:
        record = self._records.get(relative)

        def read() -> None:
            whole = file.verify()
            if record is not None and record.hash and whole != record.hash:
                raise ValueError("the content does not match the recorded checksum")
            if record is not None and record.steps not in (None, found := _steps(file)):
                raise ValueError(f"the rows cover steps {found}, but the writer recorded {record.steps}")

        return _Part(folder=folder, name=relative, num_bytes=file.num_bytes, read=read)

    def _document(self, folder: str, relative: str, record: SealedFile) -> _Part:
        def read() -> None:
            try:
                is_of_size = self.store.file_size(relative) == record.num_bytes
                content = self.store.read_bytes(relative) if is_of_size else b""
            except FileNotFoundError:
                raise DamagedTrace(f"{self.store.shown(relative)} is missing. Restore the file from a backup") from None
            if not is_of_size or whole_hash(content) != record.hash:
                raise ValueError("the content does not match the recorded checksum")

        return _Part(folder=folder, name=relative, num_bytes=record.num_bytes, read=read)

    def _groups(self) -> Iterator[_Part | str]:
        for name in self.store.folders(DENSE):
            relative, segment = f"{DENSE}/{name}", Segment.parse(name)
            if segment is None:
                yield f"{self.store.shown(relative)} does not belong to a trace; remove it"
                continue
            if self.store.exists(f"{relative}/zarr.json") and not is_sealed(self.store, segment):
                continue  # the journal is read below
            read = partial(self._group, segment)
            yield _Part(folder=DENSE, name=relative, num_bytes=self.store.size(relative), read=read)
        for segment, tables in journaled_segments(self.store).items():
            if DENSE_TABLE in tables and not is_sealed(self.store, segment):
                where, read = segment.journal(DENSE_TABLE), partial(self._journal, segment)
                yield _Part(folder=DENSE, name=where, num_bytes=self.store.file_size(where), read=read)

    def _ask_for_groups(self) -> None:
        columns = [(name, view) for name in ("dense", "routing") for view in ("all_scores", "all_eval_scores")]
        query = " UNION ".join(f"SELECT {name} FROM {view} WHERE {name} IS NOT NULL" for name, view in columns)
        try:
            for (group,) in open_database(self.source).connection.execute(query).fetchall():
                open_dense(self.store, group)
        except TimTraceError as error:
            self.damaged.append(str(error))

    def _journal(self, segment: Segment) -> None:
        where, content = self.store.shown(segment.journal(DENSE_TABLE)), read_journal(self.store, segment, DENSE_TABLE)
        if content.damage is not None:
            raise DamagedTrace(
                f"{where}: {content.damage}; results exclude all later records. Restore the file from a backup"
            )
        found = self.source.liveness.get(segment.writer)
        if content.torn_bytes and not (found is not None and found.is_alive):
            raise DamagedTrace(torn_record(where, content.torn_bytes))

    def _group(self, segment: Segment) -> None:
        from ..tracer.dense_store import SealedGroup

        SealedGroup(self.store, segment, sealed_root(self.store, segment)).verify()

    def _weights(self) -> Iterator[_Part | str]:
        reader = open_weights(self.store)
        if not isinstance(reader, WeightReader):  # the weights are checkpoints outside the trace
            return
        yield from reader.damaged
        for relative, record in self._records.items():
            if relative.startswith(f"{WEIGHTS}/") and relative.count("/") > 1:
                yield self._document(WEIGHTS, relative, record)
        for version in reader.versions:
            num_bytes = sum(part.num_bytes for part in reader.parts[version])
            attempts = reader.attempts(version)
            for attempt in attempts:
                name = f"{WEIGHTS}: version {version}" + (f", attempt {attempt}" if len(attempts) > 1 else "")
                yield _Part(
                    folder=WEIGHTS, name=name, num_bytes=num_bytes,
                    read=partial(reader.load, version, attempt), of_parts=partial(reader.damaged_parts, version, attempt),
                )  # fmt: skip

    def _located(self) -> Iterator[_Part]:
        seen = {result_path(result): result for result in result_ids(self.store)}
        for relative, result in seen.items():
            read = partial(read_result, self.store, result)
            yield _Part(folder=LOCATE, name=relative, num_bytes=self.store.file_size(relative), read=read)
        others = [relative for name in self.store.files(LOCATE) if (relative := f"{LOCATE}/{name}") not in seen]
        self.ignored += [f"{self.store.shown(relative)}: not a result of `locate`; remove it" for relative in others]


def _steps(file: VerifiedFile) -> tuple[int, int]:
    ends = pc.min_max(ParquetFile(pa.PythonFile(FileCursor(file), mode="r")).read(["step"])["step"])
    return ends["min"].as_py(), ends["max"].as_py()
