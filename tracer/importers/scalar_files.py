"""Read files of logged scalars, one row per record. Only .json files are read into memory in full."""

from __future__ import annotations

import csv
import gzip
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import ImportFailed, NotInstalled
from ...schemas.layout import HYPERPARAMETER
from .columns import ROWS_AT_ONCE, explained, listed_names, shown_name
from .format import DumpFolder
from .textfiles import TIMES_AS_JSON, as_object, line_objects, lines_of, opened, parsed, whole_content

Row = tuple[str, int | None, Mapping[str, Any]]
"""Location of a row, its step (None if the step is among the values), and its values by name."""

_LINES = "each line must be an object with a step"
_SUFFIXES = (".csv", ".tsv", ".log", ".out", ".txt", ".json", ".jsonl", ".ndjson", ".parquet")
_KINDS = ((r"trainer_state\.json", r"(checkpoint-\d+/)?[^/]*$"), (r".*\.tfevents\..*", "[^/]*$"), (r".*\.wandb", ".*/"))
"""Patterns for scalar files, each with a pattern for the part of the path that varies within a run."""


def is_of_scalars(folder: DumpFolder) -> bool:
    if any(folder.first(pattern) for pattern, _ in _KINDS):
        return True
    name = folder.files[0].removesuffix(".gz")
    if not folder.is_file or not name.endswith(_SUFFIXES[5:]):
        return folder.is_file and name.endswith(_SUFFIXES)
    try:  # accept JSON or Parquet whose first record has only numbers
        nested: dict[str, None] = {}
        _, _, values = next(rows_of(folder.path(folder.files[0]), [], nested), ("", None, {}))
    except ImportFailed:
        return False
    return bool(values) and not nested and all(isinstance(value, (int, float, NoneType)) for value in values.values())


def files_of(folder: DumpFolder) -> tuple[list[str], list[str]]:
    """Return the files to read, in order, and a note about skipped scalar files."""
    tables = [name for name in folder.files if folder.is_file or name.removesuffix(".gz").endswith(_SUFFIXES[:-1])]
    kinds = [] if folder.is_file else [(list(folder.matching(of)), part) for of, part in _KINDS]
    found, *others = [kind for kind in (*kinds, (tables, "^$")) if kind[0]] or [([], "")]
    if not found[0]:
        raise ImportFailed(f"{folder.url} contains no scalar files. Pass a CSV, JSON, log, event or .wandb file")
    if len({re.sub(found[1], "", name) for name in found[0]}) > 1:
        raise ImportFailed(f"{folder.url} contains several runs or tables. Pass one of {listed_names(found[0])}")
    rest = [name for names, part in others if names is not tables for name in names]
    # Of several checkpoints, read only the last, because it contains the full history up to its step.
    return found[0][-1:] if found[1] == _KINDS[0][1] else found[0], [
        f"{listed_names(rest)} (pass one to read it)"
    ] if rest else []


def rows_of(path: Path, notes: list[str], ignored: dict[str, None]) -> Iterator[Row]:
    """Yield a file's rows. Adds a sentence to `notes` if the file ends early, and non-scalar columns to `ignored`."""
    name = path.name.removesuffix(".gz")
    suffix = ".tfevents" if ".tfevents." in name else os.path.splitext(name)[1]
    with explained(str(path), "scalars"):
        yield from _READERS.get(suffix, _console_rows)(path, notes, ignored)


def _file(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else opened(path)


def _parquet_rows(path: Path, _notes: list[str], ignored: dict[str, None]) -> Iterator[Row]:
    parquet = pq.ParquetFile(path)
    ignored.update((field.name, None) for field in parquet.schema_arrow if pa.types.is_nested(field.type))
    kept = [name for name in parquet.schema_arrow.names if name not in ignored]
    batches = parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=kept)
    for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
        yield f"{path}, row {number}", None, row


def _json_rows(path: Path, notes: list[str], ignored: dict[str, None]) -> Iterator[Row]:
    content = whole_content(path, TIMES_AS_JSON)
    if b"}\n{" in content:
        yield from _line_rows(path, notes, ignored)
        return
    value = parsed(content, str(path), "a .json file must be a list of objects, or have a log_history")
    records = value.get("log_history", [value]) if isinstance(value, dict) else value
    if not isinstance(records, list):
        raise ImportFailed(
            f"{path} is not a list of objects and has no log_history. Pass the file that the trainer saved"
        )
    for number, record in enumerate(records, start=1):
        where = f"{path}, record {number}"
        yield where, None, as_object(record, where, "each record must hold one step")


def _line_rows(path: Path, notes: list[str], _ignored: dict[str, None]) -> Iterator[Row]:
    with _file(path) as file:
        for number, record in line_objects(file, path, _LINES, notes):
            yield f"{path}, line {number}", None, record


def _csv_rows(path: Path, _notes: list[str], ignored: dict[str, None]) -> Iterator[Row]:
    with _file(path) as file:
        numbered = lines_of(file, path)
        number, head = next(numbered, (1, b""))

        def texts() -> Iterator[str]:
            nonlocal number
            for at, line in numbered:
                number = at
                yield line.decode()

        if not head:
            return
        try:
            delimiter = max(",\t;", key=head.decode().count)
            (names,) = csv.reader([head.decode("utf-8-sig")], delimiter=delimiter)
            named = _columns(path, names, ignored)
            for cells in csv.reader(texts(), delimiter=delimiter):
                where = f"{path}, line {number}"
                if len(cells) != len(names):
                    raise ImportFailed(
                        f"{where} has {len(cells)} cells for {len(names)} columns. Repair or remove the line"
                    )
                yield where, None, {name: cell for name, cell in zip(named, cells, strict=True) if name and cell != ""}
        except (csv.Error, UnicodeDecodeError) as error:
            remedy = "Write UTF-8 text with one header line"
            raise ImportFailed(f"{path}, line {number} cannot be read as CSV ({error}). {remedy}") from error


def _columns(path: Path, names: list[str], ignored: dict[str, None]) -> list[str]:
    """Return each column's name, or "" to skip it. W&B charts name columns `RUN - NAME[__MIN|__MAX]`."""
    runs = dict.fromkeys(name.rpartition(" - ")[0] for name in names[1:])
    if names[0] == "Step" and len(runs) > 1 and "" not in runs:
        raise ImportFailed(f"{path} contains {len(runs)} runs ({listed_names([*runs])}). Export one run per file")
    if names[0] == "Step" and runs and "" not in runs:
        names = [names[0], *(name.rpartition(" - ")[2] for name in names[1:])]
    counts = Counter(names)
    twice, count = counts.most_common(1)[0]
    if count > 1:
        raise ImportFailed(f"{path} has two columns named {shown_name(twice)}. Rename one")
    is_bound = [name[-5:] in ("__MIN", "__MAX") and name[:-5] in counts for name in names]
    ignored |= dict.fromkeys(name for name, bound in zip(names, is_bound, strict=True) if bound or not name)
    return ["" if bound else name for name, bound in zip(names, is_bound, strict=True)]


_COLOUR = re.compile(r"\x1b\[[0-9;]*m|\s+\[repeated .*\]$")
_VERL = re.compile(r"(?:^|[\s)])step:(\d+) - (.*)")
_SLIME = re.compile(r"(?:^|[\s-])(?:step|rollout|eval|perf|multi_turn|passrate) (\d+): \{('.*)\}")
_NUMBER = re.compile(r"(?:[\w.]+\()?([^()\s]+)\)?")
"""A number as printed, such as `0.5`, `np.float64(0.5)` or `tensor(0.5)`."""


def _console_rows(path: Path, notes: list[str], _ignored: dict[str, None]) -> Iterator[Row]:
    """Yield the values that verl and slime print at each step. Other lines are skipped.

    verl prints `step:12 - actor/pg_loss:0.1 - ...` (verl/utils/logger/aggregate_logger.py). slime and miles print
    `step 12: {'train/loss': 0.1}`, or `rollout`, `eval` or `perf` instead of `step` (slime/observability,
    backends/megatron_utils).
    """
    num_broken, broken, is_any = 0, "", False
    with _file(path) as file:
        for number, line in lines_of(file, path):
            where, text = f"{path}, line {number}", _COLOUR.sub("", line.decode(errors="replace").rstrip())
            if found := _VERL.search(text):
                items = [item.rpartition(":") for item in found[2].split(" - ")]
            elif found := _SLIME.search(text):
                items = [item.partition("': ") for item in f", {found[2]}".split(", '")[1:]]
            else:
                continue
            numbers = {name: _NUMBER.fullmatch(value) for name, _, value in items}
            values = {
                name: float(value[1]) for name, value in numbers.items() if value and name and is_number(value[1])
            }
            if len(values) < len(numbers):
                num_broken += len(numbers) - len(values)
                broken = broken or f"{where}, {next(name for name in numbers if name not in values):.40}"
            is_any |= bool(values)
            yield where, int(found[1]), values
    if broken:
        notes.append(f"{num_broken:,} items in log lines have no numeric value (first: {broken})")
    if not is_any:
        raise ImportFailed(
            f"{path} contains no scalars in the format of verl (step:1 - NAME:VALUE) or slime (step 1: {{...}}). TRL's "
            "console output has no steps: import its trainer_state.json. A table of scalars needs the suffix .csv or "
            ".jsonl"
        )


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _event_rows(path: Path, notes: list[str], ignored: dict[str, None]) -> Iterator[Row]:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise NotInstalled("event files need TensorBoard, which is not installed; pip install tensorboard") from error
    whole, is_cut, number = *_num_records(path), 0
    for number, record in enumerate(RawEventFileLoader(str(path)).Load(), start=1):
        where = f"{path}, record {number}"
        values: dict[str, Any] = {}
        try:
            event = Event.FromString(record)
            for value in event.summary.value:
                array = make_ndarray(value.tensor) if value.HasField("tensor") else np.asarray(value.simple_value)
                is_scalar = array.size == 1 and array.dtype.kind in "fiu"
                if is_scalar and value.WhichOneof("value") in ("simple_value", "tensor"):
                    values[value.tag] = array.item()
                else:
                    ignored[value.tag] = None
        except (DecodeError, KeyError, TypeError, ValueError) as error:
            raise ImportFailed(f"{where} is not an event ({error}). Check that the file is an event file") from error
        if values:
            yield where, event.step, values
    if number < whole or (is_cut and not whole):
        raise ImportFailed(f"{path}: record {number + 1:,} is damaged. Copy the file again from the original")
    if is_cut:
        notes.append(f"{path} ends in the middle of record {whole + 1:,}, which was not read")


def _num_records(path: Path) -> tuple[int, bool]:
    """Return the number of records in an event file, and whether the file ends in the middle of a record.

    Records are not decoded. TensorBoard silently stops at a damaged record, so its own count may be too low.
    """
    size, at, num = path.stat().st_size, 0, 0
    with opened(path) as file:
        while at + 16 <= size:
            file.seek(at)
            end = at + 16 + int(struct.unpack("<Q", file.read(8))[0])
            if end > size:
                break
            at, num = end, num + 1
    return num, at < size


def _wandb_rows(path: Path, notes: list[str], ignored: dict[str, None]) -> Iterator[Row]:
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise NotInstalled(".wandb files need W&B, which is not installed; pip install wandb") from error
    for number, content in enumerate(_wandb_records(path, notes), start=1):
        where = f"{path}, record {number}"
        try:
            record = Record.FromString(content)
        except DecodeError as error:
            raise ImportFailed(
                f"{where} is not a W&B record ({error}). Install the wandb release that wrote it"
            ) from error
        named = {
            (*item.nested_key,) or (item.key,): parsed(item.value_json.encode(), where, "copy the file again")
            for item in (*record.history.item, *record.config.update, *record.run.config.update)
        }
        objects = {key[:-1] for key in named if key[-1] == "_type"}  # histograms, images, tables
        ignored |= dict.fromkeys("/".join(key) for key in objects)
        values = {
            "/".join(key): value for key, value in named.items() if not any(key[:n] in objects for n in range(len(key)))
        }
        if record.HasField("history"):
            yield where, None, values
        elif values:
            yield where, 0, {f"{HYPERPARAMETER}{name}": value for name, value in values.items() if name != "_wandb"}


_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def _wandb_records(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the records of a W&B run file.

    After its first 7 bytes, the file is in LevelDB's log format (wandb/sdk/internal/datastore.py).
    """
    parts, at, size = list[bytes](), 7, path.stat().st_size
    with opened(path) as file:
        if file.read(7)[:4] != b":W&B":
            raise ImportFailed(f"{path} is not a W&B run file. Pass the .wandb file that an offline run wrote")
        while at < size:
            if (left := _BLOCK - at % _BLOCK) < _HEADER.size:
                at += len(file.read(left))
                continue
            head = file.read(_HEADER.size)
            checksum, length, kind = _HEADER.unpack(head) if len(head) == _HEADER.size else (0, 1, 0)
            content = file.read(length)
            at += len(head) + length
            if len(content) < length:
                break
            if zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
                raise ImportFailed(f"{path} is damaged at byte {at - length:,}. Copy the file again from the original")
            parts.append(content)
            if kind in (_FULL, _LAST):
                yield b"".join(parts)
                parts = []
    if parts or at > size:
        notes.append(f"{path} ends in the middle of a record, which was not read")


_READERS = {
    ".tfevents": _event_rows, ".wandb": _wandb_rows, ".csv": _csv_rows, ".tsv": _csv_rows, ".json": _json_rows,
    ".parquet": _parquet_rows, ".jsonl": _line_rows, ".ndjson": _line_rows,
}  # fmt: skip
