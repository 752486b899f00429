"""One Zarr group of captured distributions, open for reading: sealed, or still in a journal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..schemas.checksums import SealedFile
from ..schemas.errors import DamagedTrace, InvalidRecord
from ..schemas.layout import DENSE, ROUTING, Segment
from ..schemas.passes import check_pass_name
from .journal import DENSE_TABLE, journaled_segments, read_journal
from .store import Store

BFLOAT16 = "bfloat16"

Rows = Callable[[int, int], np.ndarray]
"""(first row, number of rows) -> their bits."""


@dataclass(frozen=True, slots=True)
class DenseArray:
    """An array of a group."""

    dtype: str
    """What the bits mean: `bfloat16` comes as uint16."""
    width: int
    """Elements of a row."""
    bits: Rows


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """The arrays of a group by name."""

    arrays: Mapping[str, DenseArray]

    def read(self, start: int, rows: int) -> dict[str, np.ndarray]:
        """Rows of every array, bfloat16 widened to float32."""
        return {name: widen(array.bits(start, rows), array.dtype) for name, array in self.arrays.items()}


def open_dense(store: Store, group: str) -> DenseGroup:
    """Open a group by the name that a score's column `dense` or `routing` holds.

    Raises DamagedTrace when it is not there or not as it was written.
    """
    name, _, pass_name = group.partition("/")
    segment = Segment.parse(name)
    if segment is None:
        raise InvalidRecord(f"{group!r} is no Zarr group of a trace; pass the score's column `dense`")
    check_pass_name(pass_name.removeprefix(f"{ROUTING}/"))  # a name of parts, so that it leads nowhere else
    where = f"{segment.dense}/zarr.json"
    if store.exists(where):
        return _sealed(store, segment, pass_name)
    if DENSE_TABLE in journaled_segments(store).get(segment, ()):
        return _journaled(store, segment, group)
    if store.exists(where):  # sealed in between
        return _sealed(store, segment, pass_name)
    raise DamagedTrace(
        f"{store.shown(f'{DENSE}/{group}')}: is not there; scores name it, so the trace was copied without dense/ "
        "or the folder was removed"
    )


def _sealed(store: Store, segment: Segment, pass_name: str) -> DenseGroup:
    from .dense_store import SealedGroup  # zarr takes a while to import

    arrays = SealedGroup(store, segment, sealed_root(store, segment)).arrays(pass_name)
    return DenseGroup(
        {name: DenseArray(array.dtype, math.prod(array.shape[1:]), array.rows) for name, array in arrays.items()}
    )


def sealed_root(store: Store, segment: Segment) -> SealedFile | None:
    """What the writer of a segment says of its sealed group; None where it is of a release that said nothing.

    Raises DamagedTrace for a group that its writer does not know.
    """
    where = f"{segment.dense}/zarr.json"
    try:
        files = store.writer(segment.writer, needs_checksum=store.manifest().is_checked).files
    except FileNotFoundError as error:
        raise DamagedTrace(
            f"{store.shown(where)}: its writer's state is missing; restore writers/ from a copy"
        ) from error
    if files is not None and where not in files:
        raise DamagedTrace(f"{store.shown(where)}: its writer did not write it; remove the folder")
    return None if files is None else files[where]


def _journaled(store: Store, segment: Segment, group: str) -> DenseGroup:
    blocks: dict[str, list[tuple[int, np.ndarray]]] = {}
    dtypes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for batch in read_journal(store, segment, DENSE_TABLE).batches:
        for row in range(batch.num_rows):
            if batch["group"][row].as_py() == group:
                name = batch["array"][row].as_py()
                dtype, storage, trailing = parsed(batch["dtype"][row].as_py())
                values = np.frombuffer(batch["data"][row].as_buffer(), storage).reshape(-1, *trailing)
                blocks.setdefault(name, []).append((batch["start"][row].as_py(), values))
                dtypes[name] = dtype, trailing

    def rows_of(name: str) -> Rows:
        def bits(start: int, rows: int) -> np.ndarray:
            parts = [
                values[max(start - begins, 0) : max(start + rows - begins, 0)]
                for begins, values in blocks[name]
                if begins < start + rows and start < begins + len(values)
            ]
            if sum(map(len, parts)) != rows:
                raise DamagedTrace(f"{store.shown(segment.journal(DENSE_TABLE))}: lacks rows of {group}/{name}")
            return np.concatenate([blocks[name][0][1][:0], *parts])

        return bits

    return DenseGroup(
        {name: DenseArray(dtype, int(np.prod(shape)), rows_of(name)) for name, (dtype, shape) in dtypes.items()}
    )


def parsed(typed: str) -> tuple[str, np.dtype, tuple[int, ...]]:
    """Read `dtype[trailing,shape]`: dtype, the dtype that holds its bits, shape of a row."""
    dtype, _, shape = typed.rstrip("]").partition("[")
    return dtype, np.dtype("uint16" if dtype == BFLOAT16 else dtype), tuple(int(n) for n in shape.split(",") if n)


def widen(values: np.ndarray, dtype: str) -> np.ndarray:
    """Turn the bits of bfloat16 into the float32 of the same value; leave every other dtype alone."""
    if dtype != BFLOAT16:
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)
