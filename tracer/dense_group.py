from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from ..schemas.checksums import SealedFile
from ..schemas.errors import DamagedTrace, InvalidRecord
from ..schemas.layout import DENSE, ROUTING, Segment
from ..schemas.passes import check_pass_name
from .journal import BFLOAT16, DATA_TYPES, DENSE_TABLE, read_journal
from .liveness import journaled_segments
from .store import Store, first_line


@dataclass(frozen=True, slots=True)
class DenseArray:
    dtype: str
    """dtype that the bits represent. bfloat16 is stored as uint16."""
    width: int
    bits: Callable[[int, int], np.ndarray]
    """Function that takes the first row and the number of rows, and returns the bits of those rows."""


@dataclass(frozen=True, slots=True)
class DenseGroup:
    arrays: Mapping[str, DenseArray]

    def read(self, start: int, rows: int) -> dict[str, np.ndarray]:
        return {name: widen(array.bits(start, rows), array.dtype) for name, array in self.arrays.items()}


def open_dense(store: Store, group: str) -> DenseGroup:
    """Open the group named in a score's `dense` or `routing` column.

    Raises InvalidRecord for an invalid name, and DamagedTrace if the group is missing or damaged.
    """
    name, _, pass_name = group.partition("/")
    segment = Segment.parse(name)
    if segment is None:
        raise InvalidRecord(
            f"{group!r} is not a Zarr group in a trace. Pass a value from the `dense` column of `scores`"
        )
    check_pass_name(pass_name.removeprefix(f"{ROUTING}/"))  # reject names that point outside the trace
    if is_sealed(store, segment):
        return _sealed(store, segment, pass_name)
    if DENSE_TABLE in journaled_segments(store).get(segment, ()):
        return _journaled(store, segment, group)
    if is_sealed(store, segment):  # The journal may have been sealed after the first check.
        return _sealed(store, segment, pass_name)
    raise DamagedTrace(
        f"{store.shown(f'{DENSE}/{group}')} is missing, but scores refer to it: the trace was copied without dense/, "
        "or the folder was removed. Restore it from a backup"
    )


def is_sealed(store: Store, segment: Segment) -> bool:
    """Return True if a segment's Zarr group holds its distributions, False if its journal does.

    If a killed process left both, the group counts only if the writer's state lists it.
    """
    where = f"{segment.dense}/zarr.json"
    if not store.exists(where):
        return False
    if DENSE_TABLE not in journaled_segments(store).get(segment, ()):
        return True
    try:
        return where in store.writer(segment.writer).files
    except FileNotFoundError:
        return True


def _sealed(store: Store, segment: Segment, pass_name: str) -> DenseGroup:
    from .dense_store import SealedGroup  # zarr is slow to import

    arrays = SealedGroup(store, segment, sealed_root(store, segment)).arrays(pass_name)
    return DenseGroup(
        {name: DenseArray(array.dtype, math.prod(array.shape[1:]), array.rows) for name, array in arrays.items()}
    )


def sealed_root(store: Store, segment: Segment) -> SealedFile:
    where = f"{segment.dense}/zarr.json"
    try:
        files = store.writer(segment.writer).files
    except FileNotFoundError as error:
        raise DamagedTrace(
            f"{store.shown(where)}: its writer's state is missing. Restore writers/ from a backup"
        ) from error
    if where not in files:
        raise DamagedTrace(f"{store.shown(where)} is not listed in its writer's state. Remove its folder")
    return files[where]


def _journaled(store: Store, segment: Segment, group: str) -> DenseGroup:
    where = store.shown(segment.journal(DENSE_TABLE))
    blocks: dict[str, list[Block]] = {}
    for block in blocks_of(read_journal(store, segment, DENSE_TABLE).batches, segment):
        if block.group == group:
            blocks.setdefault(block.array, []).append(block)
            if block.kind != blocks[block.array][0].kind:
                raise DamagedTrace(f"{where}: rows of {group} differ in shape")

    def bits(name: str, start: int, rows: int) -> np.ndarray:
        parts = [
            block.values[max(start - block.start, 0) : max(start + rows - block.start, 0)]
            for block in blocks[name]
            if block.start < start + rows and start < block.start + len(block.values)
        ]
        if sum(map(len, parts)) != rows:
            raise DamagedTrace(f"{where}: rows of {group}/{name} are missing")
        return np.concatenate([blocks[name][0].values[:0], *parts])

    kinds = {name: of_array[0].kind for name, of_array in blocks.items()}
    return DenseGroup(
        {name: DenseArray(dtype, math.prod(shape), partial(bits, name)) for name, (dtype, shape) in kinds.items()}
    )


@dataclass(frozen=True, slots=True)
class Block:
    group: str
    array: str
    dtype: str
    start: int
    values: np.ndarray

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.values.shape[1:]


def blocks_of(batches: Iterable[pa.RecordBatch], segment: Segment) -> Iterator[Block]:
    for batch in batches:
        for row in range(batch.num_rows):
            try:
                yield _block({name: batch[name][row] for name in batch.schema.names}, segment)
            except (ValueError, TypeError, KeyError, AttributeError, InvalidRecord) as error:
                raise DamagedTrace(
                    f"{segment.journal(DENSE_TABLE)} contains an invalid block ({first_line(error)}). Remove the file"
                ) from error


def _block(row: Mapping[str, pa.Scalar], segment: Segment) -> Block:
    group, array, typed, start, num_rows = (row[name].as_py() for name in ("group", "array", "dtype", "start", "rows"))
    name, _, pass_name = group.partition("/")
    check_pass_name(pass_name.removeprefix(f"{ROUTING}/"))
    dtype, _, sizes = typed.rstrip("]").partition("[")
    shape = tuple(int(size) for size in sizes.split(",") if size)
    storage = np.dtype("uint16" if dtype == BFLOAT16 else dtype if dtype in DATA_TYPES else None)
    if name != segment.name or not array.isidentifier() or dtype not in (*DATA_TYPES, BFLOAT16):
        raise ValueError(f"unexpected array {group!a}/{array!a} of type {typed!a}")
    values = np.frombuffer(row["data"].as_buffer(), storage)
    if start < 0 or min(shape, default=1) < 1 or values.size != num_rows * math.prod(shape):
        raise ValueError(
            f"expected {num_rows:,} rows of type {typed!a} starting at row {start:,}, got {values.size:,} values"
        )
    return Block(group, array, dtype, start, values.reshape(num_rows, *shape))


def widen(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != BFLOAT16:
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)
