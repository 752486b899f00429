"""Divide an import into units, write each unit with its own writer in a cluster actor, and merge the units.

A unit's files are written to a folder next to the future trace. Once the unit is complete, the folder gets its final name,
a hash of the unit's input. Therefore no output from a failed actor is used, and an import that was killed reuses its
complete units when it is restarted.
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
"""Target number of units in an import, high enough that actors that finish early find more work."""
LEAST_BYTES = 4 << 20
"""Minimum size of a unit, bytes. Smaller units do not justify the cost of their own writer and files."""
_DONE = f"{TEMPORARY_PREFIX}unit.json"
"""Name of the file, in a unit's folder, that holds the unit's result."""
_CPUS = 1


class Job:
    """An import of files in one format. It reads parts, and keeps track of the files and fields that were read."""

    def __init__(self, format: str, folder: DumpFolder, selection: Selection):
        self.folder, self.selection = folder, selection
        self._format = format
        self.seen: set[str] = set()
        self.sources: dict[str, SealedFile] = {}

    @property
    def name(self) -> str:
        """Identifier of the import's input and options, used to find the units of a killed import."""
        raise NotImplementedError

    def fresh(self) -> Job:
        """Return a copy of the job that has not read anything."""
        raise NotImplementedError

    def pieces(self, name: str, most: int) -> Iterator[Piece]:
        """Divide a file into pieces of about `most` bytes; yield none if the file can only be read whole."""
        raise NotImplementedError

    def take_piece(self, name: str, piece: Piece) -> None:
        """Read only this piece of the file from now on."""
        raise NotImplementedError

    def add(self, part: Part, rows: RowImport, advance: Callable[[int], None]) -> int:
        """Read and record a part, or the selected piece of its file; `advance` is called with the number of bytes read.

        Returns the number of rows. Raises ImportFailed.
        """
        raise NotImplementedError

    def finish(self, num_read: int, rows: RowImport) -> None:
        """Finish the import after all parts were read. Raises ImportFailed if nothing was imported."""
        if not num_read:
            raise ImportFailed(f"{self.folder.url}: holds no rows")
        if not rows.result.num_sequences:
            raise ImportFailed(
                f"{self.folder.url}: none of its {num_read} sequences was selected; give a larger --sample"
            )

    def count(self) -> None:
        """Count the rows before each file, if sequences are named by row number."""

    def num_before(self, unit: Unit) -> int:
        """Return the number of rows before a unit, if sequences are named by row number."""
        return 0

    def open_rows(
        self, folder: Path, *, ordered: bool, zero_lists: ZeroLists | None = None, num_before: int = 0
    ) -> RowImport:
        """Open a RowImport that records to `folder`."""
        return RowImport(
            folder, self._format, self.folder.url, selection=self.selection, ordered=ordered, zero_lists=zero_lists,
            num_before=num_before,
        )  # fmt: skip

    def content(self, name: str, lines: int | None) -> SealedFile:
        """Return the size and hash of a file, or of its first `lines` lines."""
        return content_of(self.folder.path(name), lines=lines)

    def still_holds(self, name: str, content: SealedFile) -> bool:
        """Return True if the part of a file that was read has not changed since."""
        if content.num_rows is None:
            return self.content(name, None).hash == content.hash
        return content_of(self.folder.path(name), num_bytes=content.num_bytes).hash == content.hash


Piece = Lines | RowGroups
"""A part of a file that is read as one unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Input for one writer: files in import order, or a piece of one file."""

    parts: tuple[Part, ...]
    num_bytes: int
    piece: Piece | None = None
    passes: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Passes with a value, and passes with a value other than 0.0, anywhere in the import; None when a unit is first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitImport:
    """Result of importing one unit."""

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
    """Names of the fields that were read."""
    sources: dict[str, dict[str, Any]]
    zeros: tuple[list[str], list[str]]
    """Passes with a value in the unit, and passes with a value other than 0.0 in the unit."""
    left_open: list[str]
    """Passes with lists of zeros that can be judged only after the whole import was read."""
    folder: str = ""


def import_parts(
    job: Job, parts: Sequence[Part], output: str | os.PathLike[str], source: str, *, ordered: bool, grows: bool, force: bool,
    ray: str | None, progress: Progress,
) -> RowImport:  # fmt: skip
    """Import parts into a new trace, or into the trace at `output` if `grows`. A failed import leaves no files behind.

    Raises ImportFailed.
    """
    manifest = Manifest(run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source=source)
    room = None if ray is None else room_of(output)
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
        raise ImportFailed(f"{output}: could not be written ({error})") from error
    rows.result.folder = Path(os.path.abspath(os.path.expanduser(output)))
    return rows


def room_of(output: str | os.PathLike[str]) -> Path:
    """Return the folder, next to the trace, that holds the units of an import until all units are complete."""
    folder = Path(os.path.realpath(os.path.expanduser(output)))
    return folder.parent / f"{TEMPORARY_PREFIX}import-{folder.name}"


def _kept_manifest(room: Path, source: str) -> Manifest | None:
    """Return the manifest left by a killed import of `source`; None if there is no such import."""
    try:
        found = Store(room).manifest()
    except (OSError, DamagedTrace):
        return None
    return found if found.source == source else None


def _units_of(job: Job, parts: Sequence[Part]) -> list[Unit]:
    """Group consecutive parts into units with about 1/UNITS of all bytes each. Large files are divided if possible."""
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
    """Import parts into `building` with actors in a cluster; return the number of rows read.

    The units' results are added to `rows.result`. Raises ImportFailed.
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
    """Rename a folder, then remove it: an actor that is being killed may still write to the folder's
    old path.
    """
    aside = room.with_name(f"{room.name}-{uuid.uuid4().hex}")
    with suppress(OSError):
        room.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _run(address: str, worker: _Reader, units: Sequence[Unit], advance: Callable[[int], None]) -> list[UnitImport]:
    """Run units in the cluster; return their results in the order of `units`."""
    found: dict[int, UnitImport] = {}
    if units:
        for number, each in run_units(address, worker, units, num_cpus=_CPUS, num_gpus=0):
            found[number] = each
            advance(units[number].num_bytes)
    return [found[number] for number in range(len(units))]


def _decides(name: str, seen: Sequence[str] | set[str], filled: Sequence[str] | set[str]) -> bool:
    """Return True if undecided zeros in a pass are placeholders."""
    zeros = ZeroLists(seen, filled)
    return not zeros.is_filled(name) and zeros.was_never_filled(name)


def _refuse_repeated(units: Sequence[tuple[Unit, Path]], folder: DumpFolder) -> None:
    """Raise ImportFailed if a sequence name occurs in two units within one step.

    Each writer checks names within its unit.
    """
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
            f"{file}: step {first['step']}, sequence {first['seq_id']!r}: occurs twice; (step, seq_id) must be unique"
        )


def _add(found: UnitImport, job: Job, rows: RowImport) -> None:
    """Add a unit's result to the result of the whole import."""
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
    """Worker that imports units in an actor."""

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
        """Do nothing. No file is open between units, because `run` closes each unit."""

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
    """Return the result of a unit that a killed import had completed.

    Returns None if there is no result or the unit's input files have changed.
    """
    try:
        found = UnitImport(**json.loads((place / _DONE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    held = all(job.still_holds(name, _content(content)) for name, content in found.sources.items())
    return replace(found, folder=str(place)) if held else None
