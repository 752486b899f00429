"""An import in units, each written by a writer of its own: what an actor of a cluster does, and what joins them.

A unit's files lie in a folder beside the trace that is to be. It is named for what it is of once it is whole: of an actor that dies
nothing is taken, and what was whole when a driver was killed is taken over by the same import that is started again.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ... import __version__
from ...schemas.checksums import SealedFile, short_hash
from ...schemas.clock import now
from ...schemas.errors import DamagedTrace, ImportFailed, TimTraceError
from ...schemas.layout import MANIFEST, SEQUENCES, TEMPORARY_PREFIX
from ...schemas.manifest import Manifest
from ...schemas.tables import TABLES
from ..cluster import connected, run_units
from ..create import grown_trace, whole_trace
from ..progress import Progress
from ..replaced import move_part
from ..store import Store
from ..whole_file import write_whole
from .arrowfiles import RowGroups
from .dump import DumpFolder, Part, content_of
from .file_lines import Lines
from .placeholders import ZeroLists
from .row_import import RowImport
from .selection import Selection

UNITS = 64
"""Into which an import is divided: actors that are done early find others left."""
LEAST_BYTES = 4 << 20
"""Of a unit: a writer and its files are not worth less."""
_DONE = f"{TEMPORARY_PREFIX}unit.json"
"""In a unit's folder, what became of it."""
_CPUS = 1


class Job:
    """What is imported how, and which files were read."""

    def __init__(self, format: str, folder: DumpFolder, selection: Selection):
        self.folder, self.selection = folder, selection
        self._format, self._url = format, folder.url
        self.seen: set[str] = set()
        self.sources: dict[str, SealedFile] = {}

    @property
    def name(self) -> str:
        """Of what is imported how."""
        raise NotImplementedError

    def fresh(self) -> Job:
        """The same before anything was read."""
        raise NotImplementedError

    def pieces(self, name: str, most: int) -> Iterator[Piece]:
        """A file in pieces of about so many bytes; none of one that is read as a whole."""
        raise NotImplementedError

    def take_piece(self, name: str, piece: Piece) -> None:
        """From now on read this of a file alone."""
        raise NotImplementedError

    def add(self, part: Part, rows: RowImport, advance: Callable[[int], None]) -> int:
        """Read a part, or what was taken of its one file, and record it; `advance` is called with the bytes that were read.

        Returns the number of rows. Raises ImportFailed.
        """
        raise NotImplementedError

    def finish(self, num_read: int, rows: RowImport) -> None:
        """Record what can be said once everything was read. Raises ImportFailed where nothing was imported."""
        if not num_read:
            raise ImportFailed(f"{self._url}: holds no rows; each is one sequence")
        if not rows.result.num_sequences:
            raise ImportFailed(f"{self._url}: none of its {num_read} sequences was chosen; take a larger --sample")

    def count(self) -> None:
        """Count the rows before each file, where sequences are called by their numbers."""

    def num_before(self, unit: Unit) -> int:
        """Rows that come before those of a unit, where sequences are called by their numbers."""
        return 0

    def open_rows(
        self, folder: Path, *, ordered: bool, zero_lists: ZeroLists | None = None, num_before: int = 0
    ) -> RowImport:
        """Where rows are recorded to."""
        return RowImport(
            folder, self._format, self._url, selection=self.selection, ordered=ordered, zero_lists=zero_lists,
            num_before=num_before,
        )  # fmt: skip

    def content(self, name: str, lines: int | None) -> SealedFile:
        """What a file holds, or its first lines."""
        return content_of(self.folder.path(name), lines=lines)

    def still_holds(self, name: str, content: SealedFile) -> bool:
        """Whether a file holds what it held, as far as it was read."""
        if content.num_rows is None:
            return self.content(name, None).hash == content.hash
        return content_of(self.folder.path(name), num_bytes=content.num_bytes).hash == content.hash


Piece = Lines | RowGroups
"""What is read of a file by one writer, where that is not all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Files that one writer reads, in the order of the import, or a piece of one file."""

    parts: tuple[Part, ...]
    num_bytes: int
    piece: Piece | None = None
    passes: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Those that have a value, and another one than 0.0, somewhere in the import, where it matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitImport:
    """What became of a unit."""

    num_read: int
    num_sequences: int
    num_tokens: int
    num_metrics: int
    num_above_zero: int
    placeholders: dict[str, int]
    passes: list[str]
    scored: list[str]
    ignored_columns: list[str]
    fields: list[str]
    """Names of fields that were read."""
    sources: dict[str, dict[str, Any]]
    zeros: tuple[list[str], list[str]]
    """Passes that have a value, and another one than 0.0."""
    left_open: list[str]
    """Passes of which it had zeros about which the whole import decides."""
    folder: str = ""


def import_parts(
    job: Job, parts: Sequence[Part], output: str | os.PathLike[str], source: str, *, ordered: bool, grows: bool, force: bool,
    ray: str | None, progress: Progress,
) -> RowImport:  # fmt: skip
    """Import parts into a new trace, or into the one at `output` where it `grows`; nothing is left of an import that fails.

    Raises ImportFailed.
    """
    manifest = Manifest(run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source=source)
    room = None if ray is None else _room_of(output)
    if room is not None and not grows:
        manifest = _kept_manifest(room, source) or manifest
    place = grown_trace(output) if grows else whole_trace(output, manifest, force=force)
    try:
        with connected(ray), place as folder, job.open_rows(folder, ordered=ordered) as rows:
            if ray is None or room is None:
                num_read = 0
                with progress("importing", sum(job.folder.num_bytes(part.files) for part in parts)) as advance:
                    for part in parts:
                        num_read += job.add(part, rows, advance)
            else:
                job.count()
                num_read = _add_units(job, parts, rows, folder, room, ordered=ordered, address=ray, progress=progress)
            job.finish(num_read, rows)
    except TimTraceError:
        raise
    except OSError as error:
        raise ImportFailed(f"{output}: could not be imported to ({error})") from error
    rows.result.folder = Path(os.path.abspath(os.path.expanduser(output)))
    return rows


def _room_of(output: str | os.PathLike[str]) -> Path:
    """The folder beside a trace where the units of its import lie until all of them are whole."""
    folder = Path(os.path.realpath(os.path.expanduser(output)))
    return folder.parent / f"{TEMPORARY_PREFIX}import-{folder.name}"


def _kept_manifest(room: Path, source: str) -> Manifest | None:
    """The manifest of a new trace whose import was killed; None where there is none."""
    try:
        found = Store(room).manifest()
    except (OSError, DamagedTrace):
        return None
    return found if found.source == source else None


def _units_of(job: Job, parts: Sequence[Part]) -> list[Unit]:
    """Neighbouring parts of about 1/UNITS of the bytes; a large file is cut where that can be done."""
    sizes = [job.folder.num_bytes(part.files) for part in parts]
    most = max(sum(sizes) // UNITS, LEAST_BYTES)
    units: list[Unit] = []
    for part, size in zip(parts, sizes, strict=True):
        is_large = size > 2 * most and len(part.files) == 1
        if is_large and (pieces := list(job.pieces(part.files[0], most))):
            units += [Unit(parts=(part,), num_bytes=piece.num_bytes, piece=piece) for piece in pieces]
        elif units and units[-1].piece is None and units[-1].num_bytes + size <= most:
            units[-1] = replace(units[-1], parts=(*units[-1].parts, part), num_bytes=units[-1].num_bytes + size)
        else:
            units.append(Unit(parts=(part,), num_bytes=size))
    return units


def _add_units(
    job: Job, parts: Sequence[Part], rows: RowImport, building: Path, room: Path, *, ordered: bool,
    address: str, progress: Progress,
) -> int:  # fmt: skip
    """Import parts by the actors of a cluster into a trace that is being built. The number of rows that were read.

    What they bring in is added to what `rows` says of the import. Raises ImportFailed.
    """
    manifest = (building / MANIFEST).read_bytes()
    if not (room / MANIFEST).exists() or (room / MANIFEST).read_bytes() != manifest:
        shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True, exist_ok=True)
    write_whole(room / MANIFEST, manifest)
    units = _units_of(job, parts)
    worker = _Reader(job, room, ordered)
    try:
        with progress("importing", sum(unit.num_bytes for unit in units)) as advance:
            found = _run(address, worker, units, advance)
            seen, filled = ({name for each in found for name in each.zeros[kind]} for kind in (0, 1))
            again = [
                place for place, each in enumerate(found)
                if any(_decides(name, *each.zeros) != _decides(name, seen, filled) for name in each.left_open)
            ]  # fmt: skip
            told = tuple(sorted(seen)), tuple(sorted(filled))
            known = [replace(units[place], passes=told) for place in again]
            for place, each in zip(again, _run(address, worker, known, lambda num_bytes: None), strict=True):
                found[place] = each
        if not ordered:
            _refuse_repeated([(unit, Path(each.folder)) for unit, each in zip(units, found, strict=True)], job.folder)
        for each in found:
            _add(each, job, rows)
            move_part(Path(each.folder), building)
        for name in {unit.parts[0].files[0] for unit in units if isinstance(unit.piece, Lines)}:
            job.sources[name] = job.content(name, job.sources[name].num_rows)
    except ImportFailed:
        _remove(room)
        raise
    _remove(room)
    return sum(each.num_read for each in found)


def _remove(room: Path) -> None:
    """Rename a folder, then remove it: an actor that is being killed may still write to its old path."""
    aside = room.with_name(f"{room.name}-{uuid.uuid4().hex}")
    with suppress(OSError):
        room.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _run(address: str, worker: _Reader, units: Sequence[Unit], advance: Callable[[int], None]) -> list[UnitImport]:
    """What became of units, in their order."""
    found: dict[int, UnitImport] = {}
    if units:
        for number, each in run_units(address, worker, units, num_cpus=_CPUS, num_gpus=0):
            found[number] = each
            advance(units[number].num_bytes)
    return [found[number] for number in range(len(units))]


def _decides(name: str, seen: Sequence[str] | set[str], filled: Sequence[str] | set[str]) -> bool:
    """Whether zeros of a pass that were left open are placeholders."""
    zeros = ZeroLists(seen, filled)
    return not zeros.is_filled(name) and zeros.was_never_filled(name)


def _refuse_repeated(units: Sequence[tuple[Unit, Path]], folder: DumpFolder) -> None:
    """Raise ImportFailed for a name that comes twice in a step: each unit has seen its own alone."""
    columns = ["step", "seq_id"]
    tables = [TABLES[SEQUENCES].schema.empty_table().select(columns).append_column("unit", pa.array([], pa.int64()))]
    for number, (_, own) in enumerate(units):
        for path in sorted((own / SEQUENCES).glob("*.parquet")):
            names = pq.read_table(path, columns=columns)
            tables.append(names.append_column("unit", pa.repeat(number, names.num_rows)))
    counted = pa.concat_tables(tables, promote_options="permissive").group_by(columns, use_threads=False)
    found = counted.aggregate([("unit", "count"), ("unit", "max")])
    twice = found.filter(pc.greater(found["unit_count"], 1)).sort_by("unit_max")
    if twice.num_rows:
        first = twice.slice(0, 1).to_pylist()[0]
        file = folder.path(units[first["unit_max"]][0].parts[0].files[0])
        raise ImportFailed(
            f"{file}: step {first['step']}, sequence {first['seq_id']!r}: comes a second time; (step, seq_id) names one sequence"
        )


def _add(found: UnitImport, job: Job, rows: RowImport) -> None:
    """Add what became of a unit to what became of the whole."""
    result = rows.result
    for name in ("num_sequences", "num_tokens", "num_metrics", "num_above_zero"):
        setattr(result, name, getattr(result, name) + getattr(found, name))
    for name, count in found.placeholders.items():
        setattr(result.placeholders, name, getattr(result.placeholders, name) + count)
    result.passes += tuple(name for name in found.passes if name not in result.passes)
    result.ignored_columns += tuple(name for name in found.ignored_columns if name not in result.ignored_columns)
    rows.scored.update(found.scored)
    job.seen.update(found.fields)
    for name, content in found.sources.items():
        own = _content(content)
        known = job.sources.get(name)
        if known is None or (own.num_rows or 0) > (known.num_rows or 0):
            job.sources[name] = own


def _content(given: Mapping[str, Any]) -> SealedFile:
    return SealedFile(num_bytes=given["num_bytes"], hash=given["hash"], num_rows=given["num_rows"])


class _Reader:
    """What an actor does."""

    def __init__(self, job: Job, room: Path, ordered: bool):
        self._job, self._room, self._ordered = job.fresh(), room, ordered

    def run(self, unit: Unit) -> UnitImport:
        told = [
            __version__,
            self._job.name,
            [part.files for part in unit.parts],
            unit.piece and asdict(unit.piece),
            unit.passes,
        ]
        place = self._room / short_hash(json.dumps(told).encode())
        job = self._job.fresh()
        if unit.piece is not None:
            ((name,),) = (part.files for part in unit.parts)
            job.take_piece(name, unit.piece)
        if (known := _known(place, job)) is not None:
            return known
        folder = self._room / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        folder.mkdir()
        shutil.copyfile(self._room / MANIFEST, folder / MANIFEST)
        found = self._import(unit, job, folder)
        write_whole(folder / _DONE, json.dumps(asdict(found)).encode())
        shutil.rmtree(place, ignore_errors=True)
        folder.rename(place)
        return replace(found, folder=str(place))

    def close(self) -> None:
        """Each unit was closed."""

    def _import(self, unit: Unit, job: Job, folder: Path) -> UnitImport:
        zeros = ZeroLists(*(unit.passes or ((), ())))
        before = job.num_before(unit)
        with job.open_rows(folder, ordered=self._ordered, zero_lists=zeros, num_before=before) as rows:
            num_read = sum(job.add(part, rows, lambda _: None) for part in unit.parts)
        for name in (name for part in unit.parts for name in part.files if name not in job.sources):
            job.sources[name] = job.content(name, None)
        result = rows.result
        return UnitImport(
            num_read=num_read, num_sequences=result.num_sequences, num_tokens=result.num_tokens,
            num_metrics=result.num_metrics, num_above_zero=result.num_above_zero, placeholders=asdict(result.placeholders),
            passes=list(result.passes), scored=sorted(rows.scored), ignored_columns=list(result.ignored_columns),
            fields=sorted(job.seen), sources={name: asdict(content) for name, content in job.sources.items()},
            zeros=(sorted(zeros.seen), sorted(zeros.filled)), left_open=list(rows.left_open),
        )  # fmt: skip


def _known(place: Path, job: Job) -> UnitImport | None:
    """What became of a unit before, where its files hold what they held."""
    try:
        found = UnitImport(**json.loads((place / _DONE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    held = all(job.still_holds(name, _content(content)) for name, content in found.sources.items())
    return replace(found, folder=str(place)) if held else None
