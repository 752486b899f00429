"""Compare the captured distributions of two passes token by token: the Python part of the macro `pair_distributions`.

Shapes: C tokens in a chunk.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...schemas.errors import DamagedTrace, TimTraceError
from ...tracer.dense import HIDDEN, LOGITS, LOGPROBS, TAIL, TOKEN_IDS
from ...tracer.dense_group import DenseGroup, open_dense
from ..trace.ragged import ARROW
from ..trace.source import Source
from .bounds import compare_partly
from .divergence import MEASURES, Full, compare_full
from .head_logits import Heads
from .topk import TopK

CHUNK_BYTES = 16 << 20
"""Size of a chunk's float64 logits in bytes; comparing a chunk takes about fifteen times as much memory."""
OPEN_GROUPS = 8

TYPES = {name: ARROW[kind] for name, kind in MEASURES.items()}


class Place(NamedTuple):
    """Location of one side's rows, with the keys of the head and the contract to use."""

    run: str
    group: str
    contract: str | None
    policy_version: int | None
    attempt: int | None


@dataclass(frozen=True, slots=True)
class _Opened:
    group: DenseGroup
    contract: dict[str, Any]
    heads: Heads
    place: Place

    @property
    def width(self) -> int:
        """Number of elements in a token's distribution."""
        arrays = self.group.arrays
        return self.head.weight_VH.shape[0] if HIDDEN in arrays else max(array.width for array in arrays.values())

    @property
    def head(self) -> Any:
        dtype = self.group.arrays[HIDDEN].dtype
        return self.heads.head(self.contract, self.place.policy_version, self.place.attempt, dtype)

    def side(self, rows_C: np.ndarray) -> Full | TopK:
        """Return the distributions behind the logprobs of the pass, with logits divided by the contract's
        temperature.
        """
        arrays = _gathered(self.group, rows_C)
        if TOKEN_IDS in arrays:
            ids, logprobs, tail = (arrays[name] for name in (TOKEN_IDS, LOGPROBS, TAIL))
            sampled = (self.contract.get("sampling") or {}).get("temperature")
            temperature = self._temperature(sampled)
            return TopK(ids.astype(np.int64), logprobs.astype(np.float64), tail.astype(np.float64), temperature)
        if LOGPROBS in arrays:
            return Full(arrays[LOGPROBS].astype(np.float64))
        logits = self.head.logits(arrays[HIDDEN]) if HIDDEN in arrays else arrays[LOGITS]
        return Full(logits.astype(np.float64) / self._temperature())

    def _temperature(self, sampled: Any = None) -> float:
        return float(self.contract.get("temperature") or sampled or 1.0)


class DistributionPairs:
    """Compares captured rows; calls run one at a time to limit memory use."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = {source.run: source for source in sources}
        self._heads: dict[str, Heads] = {}
        self._contracts: dict[tuple[str, str], dict[str, Any]] | None = None
        self._open: OrderedDict[Place, _Opened] = OrderedDict()
        self._lock = threading.Lock()
        self.error: tuple[type[TimTraceError], str] | None = None
        """Type and text of the error in the last call; DuckDB passes on only the text."""

    def __call__(self, *columns: pa.ChunkedArray) -> pa.Array:
        """Return a list of measures per row.

        `columns` are run and number of tokens, followed by group, first row, contract, policy version and attempt for a
        and for b.
        """
        with self._lock:
            try:
                return self._compare([column.to_pylist() for column in columns])
            except TimTraceError as error:
                # Keep the text rather than the error, whose traceback references the connection and would keep it
                # alive.
                self.error = type(error), str(error)
                raise

    def _compare(self, columns: list[list[Any]]) -> pa.Array:
        run, count, *sides = columns
        offsets = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
        found = _Measures(int(offsets[-1]))
        pieces: dict[tuple[Place, Place], list[int]] = {}
        for row, name in enumerate(run):
            pair = tuple(
                Place(name, side[0][row], *(part[row] for part in side[2:])) for side in (sides[:5], sides[5:])
            )
            pieces.setdefault(pair, []).append(row)  # type: ignore[arg-type]
        for (place_a, place_b), rows in pieces.items():
            rows_a, rows_b, out = (
                np.concatenate([first[row] + np.arange(count[row]) for row in rows])
                for first in (sides[1], sides[6], offsets)
            )
            self._compare_rows(self._opened(place_a), self._opened(place_b), rows_a, rows_b, out, found)
        return pa.ListArray.from_arrays(pa.array(offsets), found.to_arrow())

    def _compare_rows(
        self, a: _Opened, b: _Opened, rows_a: np.ndarray, rows_b: np.ndarray, out: np.ndarray, found: _Measures
    ) -> None:
        order = np.argsort(rows_a, kind="stable")
        size = max(1, CHUNK_BYTES // (8 * (a.width + b.width)))
        for begin in range(0, len(order), size):
            chunk = order[begin : begin + size]
            side_a, side_b = a.side(rows_a[chunk]), b.side(rows_b[chunk])
            if isinstance(side_a, Full) and isinstance(side_b, Full):
                found.put(out[chunk], compare_full(side_a, side_b))
            else:
                found.put(out[chunk], compare_partly(side_a, side_b))

    def _opened(self, place: Place) -> _Opened:
        if place not in self._open:
            source = self._sources[place.run]
            heads = self._heads.setdefault(place.run, Heads(source.store))
            opened = _Opened(open_dense(source.store, place.group), self._contract(place), heads, place)
            if not opened.group.arrays:
                raise DamagedTrace(f"{source.store.shown(f'dense/{place.group}')}: holds no arrays")
            self._open[place] = opened
            if len(self._open) > OPEN_GROUPS:
                self._open.popitem(last=False)
        self._open.move_to_end(place)
        return self._open[place]

    def _contract(self, place: Place) -> dict[str, Any]:
        if self._contracts is None:
            self._contracts = {
                (run, row["contract"]): json.loads(row["contract_json"])
                for run, source in self._sources.items()
                for row in source.passes
            }
        return {} if place.contract is None else self._contracts.get((place.run, place.contract), {})


class _Measures:
    """Columns of measures for compared tokens, initially NULL."""

    def __init__(self, count: int):
        self._values = {name: np.zeros(count, type.to_pandas_dtype()) for name, type in TYPES.items()}
        self._missing = {name: np.ones(count, bool) for name in MEASURES}

    def put(self, places: np.ndarray, measures: dict[str, Any]) -> None:
        for name, values in measures.items():
            missing = np.ma.getmaskarray(values)  # type: ignore[no-untyped-call]
            self._values[name][places] = np.where(missing, 0, np.ma.filled(values, 0))
            self._missing[name][places] = missing

    def to_arrow(self) -> pa.StructArray:
        arrays = [pa.array(self._values[name], type, mask=self._missing[name]) for name, type in TYPES.items()]
        return pa.StructArray.from_arrays(arrays, list(MEASURES))


def _gathered(group: DenseGroup, rows_C: np.ndarray) -> dict[str, np.ndarray]:
    """Return the given rows from every array in a group; consecutive rows are read together."""
    order = np.argsort(rows_C, kind="stable")
    parts = [group.read(start, stop - start) for start, stop in _spans(rows_C[order])]
    back = np.argsort(order, kind="stable")
    return {name: np.concatenate([part[name] for part in parts])[back] for name in group.arrays}


def _spans(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive rows as (first, last + 1)."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    for part in np.split(rows, cuts):
        yield int(part[0]), int(part[-1]) + 1
