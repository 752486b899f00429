"""Compare two passes' captured distributions token by token, for the `pair_distributions` macro.

Logits are computed from captured hidden states and the head weights of the same policy version.

Shapes: C tokens in a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...schemas.documents import Contract
from ...schemas.errors import DamagedTrace, TimTraceError, WeightsMissing
from ...tracer.dense import HIDDEN, LOGITS, LOGPROBS, TAIL, TOKEN_IDS
from ...tracer.dense_group import DenseGroup, open_dense, widen
from ...tracer.journal import BFLOAT16
from ...tracer.store import Store
from ...tracer.weights.checkpoints import CheckpointReader, open_weights
from ...tracer.weights.reader import Tensor, WeightReader
from ..trace.ragged import ARROW
from ..trace.source import Source
from .bounds import compare_partly
from .divergence import MEASURES, Array, Full, compare_full
from .topk import TopK

CHUNK_BYTES = 16 << 20
"""Maximum size of a chunk's float64 logits (bytes). A comparison needs about 15 times as much memory."""
OPEN_GROUPS = 8

TYPES = {name: ARROW[kind] for name, kind in MEASURES.items()}


class Place(NamedTuple):
    run: str
    group: str
    contract: str | None
    policy_version: int | None
    attempt: int | None


@dataclass(frozen=True, slots=True)
class _Opened:
    group: DenseGroup
    contract: Contract
    heads: Heads
    place: Place

    @property
    def width(self) -> int:
        arrays = self.group.arrays
        return self.head.weight_VH.shape[0] if HIDDEN in arrays else max(array.width for array in arrays.values())

    @property
    def head(self) -> Head:
        dtype = self.group.arrays[HIDDEN].dtype
        return self.heads.head(self.contract, self.place.policy_version, self.place.attempt, dtype)

    def side(self, rows_C: np.ndarray) -> Full | TopK:
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

    def _temperature(self, sampled: float | None = None) -> float:
        return float(self.contract.get("temperature") or sampled or 1.0)


class DistributionPairs:
    def __init__(self, sources: Sequence[Source]):
        self._sources = {source.run: source for source in sources}
        self._heads: dict[str, Heads] = {}
        self._opened = lru_cache(OPEN_GROUPS)(self._open)
        self._lock = threading.Lock()
        self._error: tuple[type[TimTraceError], str] | None = None

    @property
    def error(self) -> TimTraceError | None:
        """The last exception raised by a call, or None. It is kept because DuckDB forwards only its message."""
        return None if self._error is None else self._error[0](self._error[1])

    def __call__(self, *columns: pa.ChunkedArray) -> pa.Array:
        """Return each row's measures.

        `columns` are the run and the number of tokens, followed by each side's group, first row, contract, policy
        version and attempt.
        """
        with self._lock:
            try:
                return self._compare(columns)
            except TimTraceError as error:
                # Keep only the text, because the traceback would keep the connection alive.
                self._error = type(error), str(error)
                raise

    def _compare(self, columns: Sequence[pa.ChunkedArray]) -> pa.Array:
        run, count, *sides = (column.to_pylist() for column in columns)
        offsets = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
        found: dict[str, np.ma.MaskedArray] = {
            name: np.ma.masked_all(offsets[-1], kind.to_pandas_dtype())  # type: ignore[no-untyped-call]
            for name, kind in TYPES.items()
        }
        pieces: dict[tuple[Place, Place], list[int]] = {}
        for row, name in enumerate(run):
            a, b = (Place(name, side[0][row], *(part[row] for part in side[2:])) for side in (sides[:5], sides[5:]))
            pieces.setdefault((a, b), []).append(row)
        for (place_a, place_b), rows in pieces.items():
            rows_a, rows_b, out = (
                np.concatenate([first[row] + np.arange(count[row]) for row in rows])
                for first in (sides[1], sides[6], offsets)
            )
            self._compare_rows(self._opened(place_a), self._opened(place_b), rows_a, rows_b, out, found)
        arrays = [pa.array(found[name].filled(0), kind, mask=found[name].mask) for name, kind in TYPES.items()]
        return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(arrays, list(TYPES)))

    def _compare_rows(
        self, a: _Opened, b: _Opened, rows_a: np.ndarray, rows_b: np.ndarray, out: np.ndarray,
        found: Mapping[str, np.ma.MaskedArray],
    ) -> None:  # fmt: skip
        order = np.argsort(rows_a, kind="stable")
        size = max(1, CHUNK_BYTES // (8 * (a.width + b.width)))
        for begin in range(0, len(order), size):
            chunk = order[begin : begin + size]
            side_a, side_b = a.side(rows_a[chunk]), b.side(rows_b[chunk])
            if isinstance(side_a, Full) and isinstance(side_b, Full):
                measures = compare_full(side_a, side_b)
            else:
                measures = compare_partly(side_a, side_b)
            for name, values in measures.items():
                found[name][out[chunk]] = values

    def _open(self, place: Place) -> _Opened:
        source = self._sources[place.run]
        heads = self._heads.setdefault(place.run, Heads(source.store))
        group = open_dense(source.store, place.group)
        if not group.arrays:
            raise DamagedTrace(f"{source.store.shown(f'dense/{place.group}')} has no arrays. Restore it from a backup")
        return _Opened(group, self._contracts.get((place.run, place.contract), {}), heads, place)

    @cached_property
    def _contracts(self) -> dict[tuple[str, str | None], Contract]:
        return {
            (run, digest): contract for run, source in self._sources.items() for _, digest, contract in source.contracts
        }


def _gathered(group: DenseGroup, rows_C: np.ndarray) -> dict[str, np.ndarray]:
    order = np.argsort(rows_C, kind="stable")
    cuts = np.flatnonzero(np.diff(rows_C[order]) != 1) + 1
    parts = [group.read(int(span[0]), len(span)) for span in np.split(rows_C[order], cuts)]
    back = np.argsort(order, kind="stable")
    return {name: np.concatenate([part[name] for part in parts])[back] for name in group.arrays}


@dataclass(frozen=True, slots=True)
class Head:
    weight_VH: Array
    bias_V: Array | None
    dtype: str
    """Projection dtype, as torch names it."""
    scale: float | None
    softcap: float | None
    logits_dtype: str | None

    def logits(self, hidden_CH: Array) -> Array:
        """Return [C, V] logits before temperature, rounded wherever the pass rounded. The last bit can differ,
        because the pass's kernel may sum in another order."""
        logits_CV = rounded(hidden_CH, self.dtype) @ self.weight_VH.T
        if self.bias_V is not None:
            logits_CV = logits_CV + self.bias_V
        logits_CV = rounded(logits_CV, self.dtype)
        if self.scale is not None:
            logits_CV = rounded(logits_CV * self.scale, self.dtype)
        if self.softcap is not None:
            ratio_CV = rounded(np.tanh(rounded(logits_CV / self.softcap, self.dtype)), self.dtype)
            logits_CV = rounded(ratio_CV * self.softcap, self.dtype)
        return logits_CV if self.logits_dtype is None else rounded(logits_CV, self.logits_dtype)


class Heads:
    """A trace's output heads by policy version. Only the last one used is cached."""

    def __init__(self, store: Store):
        self.store = store
        self._held: tuple[tuple[int, int | None, str, str], Head] | None = None

    @cached_property
    def _weights(self) -> WeightReader | CheckpointReader:

        return open_weights(self.store)

    def head(self, contract: Contract, version: int | None, attempt: int | None, hidden_dtype: str) -> Head:
        described = contract.get("head")
        if described is None:
            raise DamagedTrace(
                f"{self.store.url}: the hidden states have no output head; add `head` to the contract of their pass"
            )
        if version is None:
            raise WeightsMissing(
                f"{self.store.url}: hidden states have no policy version, so their output head is unknown"
            )
        key = (version, attempt, hidden_dtype, repr(sorted(described.items())))
        if self._held is None or self._held[0] != key:
            self._held = None
            self._held = (key, self._load(described, version, attempt, described["projection_dtype"] or hidden_dtype))
        return self._held[1]

    def _load(self, described: Contract, version: int, attempt: int | None, dtype: str) -> Head:
        tensors = self._weights.load(version, attempt)

        def values(names: list[str]) -> Array:
            name = next((name for name in names if name in tensors), None)
            if name is None:
                raise WeightsMissing(f"{self.store.url}: version {version} has no tensor {' or '.join(names)}")
            return rounded(rounded(numbers(tensors[name]), described["weight_dtype"]), dtype)

        return Head(
            weight_VH=values(described["weight"]), bias_V=values(described["bias"]) if described["bias"] else None,
            dtype=dtype, scale=described["scale"], softcap=described["softcap"],
            logits_dtype=described["logits_dtype"],
        )  # fmt: skip


def numbers(tensor: Tensor) -> Array:
    if tensor.dtype == BFLOAT16:
        return widen(tensor.bits, BFLOAT16)
    return tensor.bits.view(np.dtype(tensor.dtype))


def rounded(values: Array, dtype: str) -> Array:
    """Round values to a dtype, with ties to even. The result is float64 if `dtype` is float64, else float32."""
    if dtype == "float64":
        return values.astype(np.float64)
    if dtype != BFLOAT16:
        return values.astype(np.dtype(dtype)).astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), kept.view(np.float32), values).astype(np.float32)
