"""Files in a trace's locate/ folder: writes a result to them, and reads stored results.

A result is a header, `<id>.json`, and two tables that the header lists with their hashes. The header is written last
and replaces an earlier one by rename, so that a reader sees either the old result or the new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ... import __version__
from ...schemas.checksums import SealedFile, whole_hash
from ...schemas.documents import now
from ...schemas.errors import DamagedTrace, TimTraceError
from ...schemas.layout import LOCATE
from ...schemas.located import OPERATORS, PATCHES
from ...schemas.tables import Table
from ..environment import numeric_versions
from ..parquet_file import read_footer, write_checked
from ..store import Store, first_line
from ..verified_file import FileCursor
from ..whole_file import unnamed_file, write_part
from .results import FORMAT, A, B, Located, LocateQuestion, OperatorError, Patch, ResultHeader, limits, parse_header

_AGAIN = "run locate again, or delete the file"
_HEADER = re.compile(r"[0-9a-f]{16}\.json")
_OPTIONS: dict[str, Any] = {"compression": "zstd"}
_MOST_ROWS = 1 << 20
"""Maximum number of rows in a result's table. A table with more rows is rejected without being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResult:
    """A `locate` result stored in a trace."""

    header: ResultHeader
    found: Located

    @property
    def relative(self) -> str:
        """Path of the result's header file, relative to the trace."""
        return header_path(self.header.id)


def header_path(result: str) -> str:
    """Return the path of a result's header file, relative to the trace."""
    return f"{LOCATE}/{result}.json"


# --- writing ------------------------------------------------------------------------------------------------------------


def write_result(store: Store, result: str, question: LocateQuestion, found: Located) -> str:
    """Store a result under its question's id and return its header's path. Raises OSError and StorageError."""
    folder = Path(store.root)
    before: set[str] = set()
    with suppress(TimTraceError, OSError):  # only the tables of this header: others may be another process's newer ones
        before = set(read_header(store, result).files)
    files = dict(
        _write_table(folder, result, spec, rows)
        for spec, rows in ((OPERATORS, _operator_rows(found)), (PATCHES, list(map(asdict, found.patches))))
    )
    header = ResultHeader(
        **found.facts(), format=FORMAT, id=result, run_id=store.manifest().run_id, question=question, made_at=now(),
        made_by=__version__, versions=numeric_versions(), files=files,
    )  # fmt: skip
    relative = header_path(result)
    write_part(folder, relative, header.to_json().encode())
    for name in before - set(files):
        (folder / name).unlink(missing_ok=True)
    return relative


def _write_table(folder: Path, result: str, spec: Table, rows: Sequence[dict[str, Any]]) -> tuple[str, SealedFile]:
    """Write a table to a file named after its footer's hash. Return the file's path in the trace and its record."""
    part = pa.Table.from_pylist(rows, spec.schema)
    with unnamed_file(folder, LOCATE) as temporary:
        written = write_checked(temporary, _identity(result, spec), spec.schema, [part], **_OPTIONS)
        relative = f"{_identity(result, spec)}-{written.footer}.parquet"
        temporary.rename(folder / relative)
    return relative, written


def _identity(result: str, spec: Table) -> str:
    return f"{LOCATE}/{result}-{spec.name}"


def _operator_rows(found: Located) -> list[dict[str, Any]]:
    rows = []
    for operator in found.operators:
        row = asdict(operator)
        own = found.products.get((operator.side, operator.operator))
        row["products"] = None if own is None else [own.get(each.seq_id) for each in found.sequences]
        rows.append({"forward_order": row.pop("order"), **row})
    return rows


# --- reading ------------------------------------------------------------------------------------------------------------


def result_ids(store: Store) -> list[str]:
    """Return the ids of all `locate` results stored in a trace."""
    return [name.removesuffix(".json") for name in store.files(LOCATE) if _HEADER.fullmatch(name)]


def read_header(store: Store, result: str) -> ResultHeader:
    """Read a result's header. Raises DamagedTrace, NewerTrace, OSError."""
    where = store.shown(header_path(result))
    header = parse_header(store.read_json(header_path(result)), where)
    if header.id != result:
        raise DamagedTrace(f"{where}: belongs to result {header.id}; {_AGAIN}")
    if header.run_id != store.manifest().run_id:
        raise DamagedTrace(f"{where}: belongs to run {header.run_id}, not to this one; delete it")
    names = {part: name for name in header.files for part in (OPERATORS.name, PATCHES.name) if f"-{part}-" in name}
    if len(names) != 2 or any(not name.startswith(f"{LOCATE}/{result}-") for name in names.values()):
        raise DamagedTrace(f"{where}: does not list its two tables; {_AGAIN}")
    return header


def read_results(store: Store) -> tuple[list[KeptResult], list[str]]:
    """Return every `locate` result in a trace, newest last, and one sentence for each result that cannot be read."""
    found, damaged = [], []
    for result in result_ids(store):
        try:
            found.append(read_result(store, result))
        except FileNotFoundError:  # The result was deleted after it was listed.
            continue
        except (TimTraceError, OSError) as error:
            damaged.append(str(error))
    return sorted(found, key=lambda each: (each.header.made_at, each.header.id)), damaged


def read_result(store: Store, result: str) -> KeptResult:
    """Read a stored result with its tables. Raises DamagedTrace, NewerTrace, and FileNotFoundError."""
    for _ in range(2):  # A newer result may replace this one while it is being read.
        header = read_header(store, result)
        with suppress(FileNotFoundError):
            return _read_tables(store, header)
    missing = [name for name in header.files if not store.exists(name)]
    raise DamagedTrace(f"{', '.join(map(store.shown, missing))}: is missing; {_AGAIN}")


def read_whole_table(store: Store, header: ResultHeader, relative: str) -> None:
    """Check one of a result's tables against the hash of the whole file. Raises DamagedTrace, also if it is missing."""
    try:
        read_table(store, header, relative)
        is_whole = whole_hash(store.read_bytes(relative)) == header.files[relative].hash
    except FileNotFoundError:
        raise DamagedTrace(f"{store.shown(relative)}: is missing; {_AGAIN}") from None
    if not is_whole:
        raise DamagedTrace(f"{store.shown(relative)}: its content has changed since locate wrote it; {_AGAIN}")


def read_table(store: Store, header: ResultHeader, relative: str) -> list[dict[str, Any]]:
    """Read one of a result's tables, verifying its checksums. Raises DamagedTrace and FileNotFoundError."""
    where, spec, record = store.shown(relative), _spec(header, relative), header.files[relative]
    if (size := store.file_size(relative)) != record.num_bytes:
        raise DamagedTrace(f"{where}: has {size:,} bytes, but locate wrote {record.num_bytes:,}; {_AGAIN}")
    footer = read_footer(store, relative, size)
    if footer.num_rows > _MOST_ROWS:
        raise DamagedTrace(f"{where}: has {footer.num_rows:,} rows, more than a locate result can have; {_AGAIN}")
    if (footer.hash, footer.num_rows) != (record.footer, record.num_rows):
        raise DamagedTrace(f"{where}: its footer has changed since locate wrote it; {_AGAIN}")
    if not footer.schema.remove_metadata().equals(spec.schema):
        raise DamagedTrace(f"{where}: does not have the columns of a table of {spec.name}; {_AGAIN}")
    try:
        file = footer.verified(store, relative)
        rows: list[dict[str, Any]] = pq.ParquetFile(pa.PythonFile(FileCursor(file), mode="r")).read().to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, (DamagedTrace, FileNotFoundError)):
            raise
        raise DamagedTrace(f"{where}: not readable as Parquet ({first_line(error)}); {_AGAIN}") from error
    _check_rows(rows, spec, len(header.sequences), where)
    return rows


def _read_tables(store: Store, header: ResultHeader) -> KeptResult:
    rows = {_spec(header, relative).name: read_table(store, header, relative) for relative in header.files}
    names = [each.seq_id for each in header.sequences]
    operators = [(row.pop("products"), row.pop("forward_order"), row) for row in rows[OPERATORS.name]]
    found = Located(
        **header.facts(),
        run=store.name,
        step=header.question.step,
        operators=tuple(OperatorError(order=order, **row) for _, order, row in operators),
        products={
            (row["side"], row["operator"]): {
                seq_id: product for seq_id, product in zip(names, own, strict=True) if product is not None
            }
            for own, _, row in operators
            if own is not None
        },
        patches=tuple(Patch(**row | {"squares_left": tuple(row["squares_left"])}) for row in rows[PATCHES.name]),
        only=limits(header.question.layers, header.question.operators),
    )
    return KeptResult(header=header, found=found)


def _spec(header: ResultHeader, relative: str) -> Table:
    return next(each for each in (OPERATORS, PATCHES) if relative.startswith(f"{_identity(header.id, each)}-"))


def _check_rows(rows: Iterable[dict[str, Any]], spec: Table, num_sequences: int, where: str) -> None:
    """Raise DamagedTrace if any row of a result's table has values that `locate` cannot have written."""
    never = [column.name for column in spec.columns if not column.null]
    for row in rows:
        lists = [value for value in row.values() if isinstance(value, list)]
        side = row.get("side", row.get("taker"))
        if (
            any(row[name] is None for name in never)
            or side not in (A, B)
            or any(len(values) != num_sequences for values in lists)
            or (spec is PATCHES and None in row["squares_left"])
        ):
            raise DamagedTrace(f"{where}: has rows that locate does not write; {_AGAIN}")
