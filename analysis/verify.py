"""Reading all of a trace and comparing it with what its writers say they wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..replay.locate.result_files import header_path, read_header, read_whole_table, result_ids
from ..replay.locate.result_header import ResultHeader
from ..replay.locate.unfinished import unfinished_names, unfinished_questions
from ..schemas.checksums import SealedFile, whole_hash
from ..schemas.errors import DamagedTrace, TimTraceError
from ..schemas.layout import DENSE, LOCATE, PASSES, SUMS, TABLES, TOKENIZER, WEIGHTS, Segment
from ..schemas.results import Result
from ..tracer.dense_group import is_sealed, open_dense, sealed_root
from ..tracer.index import passed_over
from ..tracer.journal import DENSE_TABLE, journaled_segments, read_journal
from ..tracer.progress import Progress, no_progress
from ..tracer.snapshot import torn_record
from ..tracer.store import first_line
from ..tracer.verified_file import VerifiedFile
from ..tracer.weights.reader import WeightReader
from ..tracer.weights.source import open_weights
from .rows import Rows, printable, to_text
from .trace.database import Database
from .trace.source import Source, open_source

COLUMNS = ("folder", "num_files", "num_bytes", "num_checked", "num_damaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Result):
    """What of a trace is as it was written."""

    _text = "tim_trace.analysis.verify:verification_text"

    trace: str
    folders: Rows
    """A row a folder: files read, their bytes, how many have checksums, and how many are not as they were written."""
    damaged: tuple[str, ...]
    """What is not as it was written or is missing, a sentence each."""
    ignored: tuple[str, ...]
    """What lies there and is no part of the trace, a sentence each."""
    unchecked_writers: tuple[str, ...]
    """Writers of earlier releases, whose files have no checksums: that they can be read is all that is known of them."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


@dataclass(slots=True)
class _Count:
    num_files: int = 0
    num_bytes: int = 0
    num_checked: int = 0
    num_damaged: int = 0


def verify(trace: str | os.PathLike[str], *, progress: Progress = no_progress) -> Verification:
    """Read all of a trace and compare it with what its writers say they wrote: every byte, row count, chunk and version.

    Other verbs compare what they read; this one reads everything. Raises TraceNotFound, NewerTrace or DamagedTrace when
    there is no trace to look at.
    """
    source = open_source(os.fspath(trace))
    found = _Verifier(source)
    with progress("verifying", found.num_bytes) as advance:
        for num_bytes in found.run():
            advance(num_bytes)
    return Verification(
        trace=os.fspath(trace),
        folders=Rows(
            COLUMNS,
            [
                (name, c.num_files, c.num_bytes, c.num_checked, c.num_damaged)
                for name, c in found.counts.items()
                if c.num_files
            ],
        ),
        damaged=tuple(dict.fromkeys((*source.damaged, *found.damaged))),
        ignored=(*source.snapshot.ignored, *found.ignored),
        unchecked_writers=tuple(source.snapshot.unchecked),
    )


def verification_text(found: Verification, width: int | None = None) -> str:
    """Write what was read, for reading: a row a folder, and what is damaged or is no part of the trace."""
    lines = [to_text(found.folders, width)]
    lines += [f"damaged: {printable(sentence)}" for sentence in found.damaged]
    lines += [f"ignored: {printable(sentence)}" for sentence in found.ignored]
    return "\n".join(lines)


class _Verifier:
    """Goes through a trace, folder by folder."""

    def __init__(self, source: Source):
        self.source, self.snapshot, self.store = source, source.snapshot, source.store
        folders = (*TABLES, PASSES, DENSE, WEIGHTS, SUMS, TOKENIZER, LOCATE)
        self.counts: dict[str, _Count] = {name: _Count() for name in folders}
        self.damaged: list[str] = []
        self.ignored: list[str] = []
        self._records = self.snapshot.accounted

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read, of the folders that are large."""
        return sum(self.store.size(folder) for folder in (*TABLES, DENSE, WEIGHTS, SUMS, TOKENIZER, LOCATE))

    def run(self) -> Iterator[int]:
        """Read everything, and tell after each part how many bytes it had."""
        for table in TABLES:
            for entry in self.snapshot.files[table]:
                yield self._file(table, entry.relative, entry.file)
        sums = {file.relative: file for pairs in self.source.sums.values() for file in pairs.values()}
        for file in sums.values():
            yield self._file(SUMS, file.relative, file)
        self.ignored += [
            f"{self.store.shown(f'{SUMS}/{name}')}: does not belong to the files that are there, or is not as it was written; it "
            "is made anew when it is needed"
            for name in self.store.files(SUMS)
            if f"{SUMS}/{name}" not in sums
        ]
        self.ignored += [
            f"{self.store.shown(relative)}: is not what its name says; it is only a copy, and the next writing of sums or of the "
            "trace makes it anew"
            for relative in passed_over(self.store)
        ]
        for relative, record in self._records.items():
            folder = relative.partition("/")[0]
            if folder in (TOKENIZER, PASSES):
                yield self._document(folder, relative, record)
        yield from self._groups()
        yield from self._weights()
        yield from self._results()

    def _file(self, folder: str, relative: str, file: VerifiedFile) -> int:
        record = self._records.get(relative)

        def read() -> None:
            whole = file.verify()
            if record is not None and whole != record.hash:
                raise ValueError("its content is not what its writer wrote")
            if not file.has_checksums:
                import pyarrow as pa
                from pyarrow.parquet import read_table

                read_table(pa.BufferReader(self.store.read_bytes(relative)))

        return self._read(folder, relative, file.num_bytes, file.has_checksums, read)

    def _document(self, folder: str, relative: str, record: SealedFile) -> int:
        def read() -> None:
            try:
                content = self.store.read_bytes(relative)
            except FileNotFoundError:
                raise DamagedTrace(f"{self.store.shown(relative)}: is missing; restore the file from a copy") from None
            if whole_hash(content) != record.hash:
                raise ValueError("its content is not what its writer wrote")

        return self._read(folder, relative, record.num_bytes, True, read)

    def _groups(self) -> Iterator[int]:
        """The sealed groups of captured distributions, and those that scores name."""
        for name in self.store.folders(DENSE):
            relative, segment = f"{DENSE}/{name}", Segment.parse(name)
            size = self.store.size(relative)
            if segment is None:
                self.damaged.append(f"{self.store.shown(relative)}: no folder of a trace; remove it")
                continue
            if self.store.exists(f"{relative}/zarr.json") and not is_sealed(self.store, segment):
                continue  # its journal is read below
            is_checked = f"{relative}/zarr.json" in self._records
            yield self._read(DENSE, relative, size, is_checked, partial(self._group, segment))
        for segment, tables in journaled_segments(self.store).items():
            if DENSE_TABLE in tables and not is_sealed(self.store, segment):
                where = segment.journal(DENSE_TABLE)
                yield self._read(DENSE, where, self.store.file_size(where), True, partial(self._journal, segment))
        query = """
            SELECT DISTINCT dense FROM all_scores WHERE dense IS NOT NULL
            UNION SELECT DISTINCT routing FROM all_scores WHERE routing IS NOT NULL
            UNION SELECT DISTINCT dense FROM all_eval_scores WHERE dense IS NOT NULL
            UNION SELECT DISTINCT routing FROM all_eval_scores WHERE routing IS NOT NULL
        """
        try:
            for (group,) in Database(self.source).connection.execute(query).fetchall():
                open_dense(self.store, group)
        except TimTraceError as error:
            self.damaged.append(str(error))

    def _journal(self, segment: Segment) -> None:
        """Captured distributions that are not sealed yet. Raises DamagedTrace."""
        where, content = self.store.shown(segment.journal(DENSE_TABLE)), read_journal(self.store, segment, DENSE_TABLE)
        if content.damage is not None:
            raise DamagedTrace(f"{where}: {content.damage}; what follows is in no answer, restore the file from a copy")
        found = self.snapshot.liveness.get(segment.writer)
        if content.torn_bytes and not (found is not None and found.is_alive):
            raise DamagedTrace(torn_record(where, content.torn_bytes))

    def _group(self, segment: Segment) -> None:
        from ..tracer.dense_store import SealedGroup

        SealedGroup(self.store, segment, sealed_root(self.store, segment)).verify()

    def _weights(self) -> Iterator[int]:
        """Every version of the weights, rebuilt and compared with its hashes."""
        reader = open_weights(self.store)
        if not isinstance(reader, WeightReader):  # checkpoints, which lie elsewhere and are the run's own
            return
        self.damaged += reader.damaged
        for relative, record in self._records.items():
            if relative.startswith(f"{WEIGHTS}/") and relative.count("/") > 1:
                yield self._document(WEIGHTS, relative, record)
        for version in reader.versions:
            num_bytes = sum(part.num_bytes for part in reader.parts[version])
            for attempt in reader.attempts(version):
                read = partial(reader.load, version, attempt)
                before = self.counts[WEIGHTS].num_damaged
                yield self._read(WEIGHTS, f"{WEIGHTS}: version {version}", num_bytes, True, read)
                if self.counts[WEIGHTS].num_damaged > before:  # by one writer's part: others may be, too
                    self.damaged += reader.damaged_parts(version, attempt)

    def _results(self) -> Iterator[int]:
        """The results of `locate`, header and tables."""
        seen: set[str] = set()
        for result in result_ids(self.store):
            relative = header_path(result)
            seen.add(relative)
            headers: list[ResultHeader] = []

            def read_into(result: str = result, headers: list[ResultHeader] = headers) -> None:
                headers.append(read_header(self.store, result))

            yield self._read(LOCATE, relative, self.store.file_size(relative), True, read_into)
            for header in headers:
                for name, record in header.files.items():
                    seen.add(name)
                    yield self._read(
                        LOCATE, name, record.num_bytes, True, partial(read_whole_table, self.store, header, name)
                    )
        unfinished: set[str] = set()
        for question in unfinished_questions(self.store):
            names = unfinished_names(self.store, question)
            unfinished |= set(names)
            self.ignored.append(
                f"{self.store.shown(f'{LOCATE}/{question}-unfinished*')}: {len(names)} files of a locate that was interrupted, or "
                "runs now; the same question again goes on from there, or remove them"
            )
        self.ignored += [
            f"{self.store.shown(f'{LOCATE}/{name}')}: is of no result of locate that can be read; remove it"
            for name in self.store.files(LOCATE)
            if f"{LOCATE}/{name}" not in seen | unfinished
        ]

    def _read(self, folder: str, relative: str, num_bytes: int, is_checked: bool, read: Callable[[], Any]) -> int:
        count = self.counts[folder]
        count.num_files += 1
        count.num_bytes += num_bytes
        count.num_checked += is_checked
        try:
            read()
        except TimTraceError as error:
            self.damaged.append(str(error))
            count.num_damaged += 1
        except Exception as error:  # whatever a library says of bytes that nobody wrote so
            self.damaged.append(f"{self.store.shown(relative)}: {first_line(error)}; restore it from a copy")
            count.num_damaged += 1
        return num_bytes
