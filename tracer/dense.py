"""Captured distributions in Zarr v3: top K and tail mass, full logits, or the last hidden states.

Shapes: N rows (one per response token), C rows in a chunk, T tokens, K kept tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.capture import Capture
from ..schemas.checksums import SealedFile
from ..schemas.errors import DamagedTrace, InvalidRecord
from ..schemas.layout import Segment
from .dense_group import Block, blocks_of, open_dense
from .journal import BFLOAT16, DENSE_SCHEMA
from .staging import is_tensor
from .store import Store

TOKEN_IDS, LOGPROBS, TAIL, LOGITS, HIDDEN = "token_ids", "logprobs", "tail_logprob", "logits", "hidden"
TOP_K = (TOKEN_IDS, LOGPROBS, TAIL)

CHUNK_BYTES = 1 << 20
CHUNKS_A_SHARD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The K most probable tokens at each position, most probable first."""

    token_ids: Any
    logprobs: Any
    """[N, K] float32 (nats)."""
    tail_logprob: Any
    """[N] float32 (nats): log of the total probability of all other tokens, -inf if that probability is 0."""

    @property
    def arrays(self) -> dict[str, Any]:
        return {TOKEN_IDS: self.token_ids, LOGPROBS: self.logprobs, TAIL: self.tail_logprob}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Full distributions before temperature and truncation, one row per position. All logits in a row may be shifted
    by the same constant."""

    logits: Any
    """[N, V] logits or logprobs in the framework's dtype."""
    kind: str = LOGITS
    """Zarr array name: `logits`, or `logprobs` from engines that return no logits."""

    @property
    def arrays(self) -> dict[str, Any]:
        return {self.kind: self.logits}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """The output head's input at each position: the last hidden state after the final norm.

    The contract's `head` entry describes how to compute logits from it.
    """

    hidden: Any

    @property
    def arrays(self) -> dict[str, Any]:
        return {HIDDEN: self.hidden}


Distribution = TopK | Logits | Hidden


def check_num_rows(arrays: Mapping[str, tuple[np.ndarray, str]], num_tokens: int, what: str) -> None:
    wrong = {name: len(values) for name, (values, _) in arrays.items() if len(values) != num_tokens}
    if wrong:
        raise InvalidRecord(
            f"{what}: distributions must have {num_tokens} rows, one per response token in the captured sequences; "
            f"got {wrong}"
        )


def tail_of(logprobs_TK: np.ndarray) -> np.ndarray:
    """Return the log probability [T] (nats) of all tokens outside the top K. It may be -inf for probabilities below
    1e-7."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        left_T = 1.0 - np.exp(logprobs_TK.astype(np.float64)).sum(axis=1)
        return np.asarray(np.log(np.maximum(left_T, 0.0)).astype(np.float32))


def block(group: str, array: str, start: int, values: np.ndarray, dtype: str) -> pa.RecordBatch:
    typed = f"{dtype}[{','.join(map(str, values.shape[1:]))}]"
    row = (group, array, typed, start, len(values), np.ascontiguousarray(values).tobytes())
    columns = [pa.array([value], field.type) for value, field in zip(row, DENSE_SCHEMA, strict=True)]
    return pa.record_batch(columns, schema=DENSE_SCHEMA)


def write_group(path: Path, segment: Segment, batches: Sequence[pa.RecordBatch]) -> SealedFile:
    """Write journal blocks as one Zarr group, and return the SealedFile of its root document. Raises DamagedTrace."""
    import zarr

    from .dense_store import write_files

    # Let Zarr write only to memory. Python waits for Zarr's threads at exit, and a stalled file system would block
    # them.
    made: dict[str, Any] = {}
    root = zarr.open_group(zarr.storage.MemoryStore(made), mode="w", zarr_format=3)
    by_array: dict[tuple[str, str], list[Block]] = {}
    for block in blocks_of(batches, segment):
        by_array.setdefault((block.group, block.array), []).append(block)
    for (group, name), blocks in by_array.items():
        _write_array(root, f"{group.partition('/')[2]}/{name}", blocks)
    return write_files(path, {name: content.to_bytes() for name, content in made.items()})


def _write_array(root: Any, name: str, blocks: list[Block]) -> None:
    from zarr.codecs import BloscCodec, Crc32cCodec

    storage, (dtype, trailing) = blocks[0].values.dtype, blocks[0].kind
    if any(block.kind != blocks[0].kind for block in blocks):
        raise DamagedTrace(f"rows of {name} have different shapes")
    num_rows = sum(len(block.values) for block in blocks)
    row_bytes = storage.itemsize * int(np.prod(trailing, dtype=np.int64))
    chunk = max(1, min(num_rows, CHUNK_BYTES // row_bytes))
    shard = chunk * min(CHUNKS_A_SHARD, -(-num_rows // chunk))
    array = root.create_array(
        name,
        shape=(num_rows, *trailing),
        dtype=storage,
        chunks=(chunk, *trailing),
        shards=(shard, *trailing),
        compressors=(BloscCodec(cname="zstd", clevel=3, shuffle="shuffle", typesize=storage.itemsize), Crc32cCodec()),
        attributes={"dtype": dtype},
        config={"write_empty_chunks": True},  # Write chunks of zeros too, so that a missing chunk means data loss.
    )
    rows = np.concatenate([block.values for block in sorted(blocks, key=lambda block: block.start)])
    for start in range(0, num_rows, shard):  # each shard is a file that is written once
        array[start : start + shard] = rows[start : start + shard]


def read_dense(store: Store, group: str, start: int, rows: int) -> dict[str, np.ndarray]:
    """Return one score row's distributions as [rows, ...] arrays by name. bfloat16 is widened to float32.

    `group` and `start` are the row's values in the columns `dense` and `dense_start`, and `rows` is its number of
    response tokens. A top-K capture has `token_ids`, `logprobs` and `tail_logprob`. Other captures have `logits`, or
    `logprobs` [rows, V] from engines that return no logits, or `hidden`. Raises DamagedTrace if they are missing.
    """
    return open_dense(store, group).read(start, rows)


def bits(value: Any) -> tuple[np.ndarray, str]:
    """Return an array's bits (bfloat16 as uint16) and its dtype name."""
    if is_tensor(value):
        name = str(value.dtype).removeprefix("torch.")
        value = value.detach()
        if name == BFLOAT16:
            import torch

            return np.asarray(value.contiguous().view(torch.uint16).numpy()), BFLOAT16
        return np.asarray(value.contiguous().numpy()), name
    array = np.asarray(value)
    return array, array.dtype.name


_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")


def scaled(logits_TV: Any, config: Any) -> Any:
    import torch

    scale = multiplier(config)
    if scale is not None:
        logits_TV = logits_TV * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap


def multiplier(config: Any) -> float | None:
    scale = next((value for name in _SCALES if (value := getattr(config, name, None)) is not None), None)
    divisor = getattr(config, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    return scale


def top_k_with_tail(logits_TV: Any, k: int, temperature: float) -> tuple[Any, Any, Any]:
    """Return token ids [T, K], their logprobs [T, K], and the tail [T]: the log probability of all other tokens.

    Logprobs are float32 (nats). The tail is -inf if K is the vocabulary size.
    """
    import torch

    k = min(k, logits_TV.shape[-1])
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    logprobs_TV = torch.log_softmax(wide_TV / temperature, dim=-1)
    top = logprobs_TV.topk(k, dim=-1)
    rest_TV = logprobs_TV.scatter(-1, top.indices, float("-inf"))
    return top.indices.to(torch.int32), top.values.float(), torch.logsumexp(rest_TV, dim=-1).float()


LOGITS_BYTES = 256 << 20
"""Maximum size of temporary float32 logits in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    model: Any
    dtype: Any = None
    """torch dtype for the matrix product. None means the hidden states' dtype."""

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def logits(self, hidden_NH: Any, chunk: int) -> Iterator[Any]:
        import torch

        dtype, config = self.dtype or hidden_NH.dtype, self.model.config.get_text_config()
        weight_VH = self.head.weight.to(dtype)
        bias_V = None if self.head.bias is None else self.head.bias.to(dtype)
        for hidden_CH in hidden_NH.split(chunk):
            yield scaled(torch.nn.functional.linear(hidden_CH.to(dtype), weight_VH, bias_V), config)

    def distribution(self, hidden: Sequence[Any], capture: Capture, temperature: float) -> Distribution:
        import torch

        with torch.no_grad():
            kept = _ChunkedArrays(sum(len(rows) for rows in hidden))
            chunk = max(1, LOGITS_BYTES // (4 * self.head.weight.shape[0]))
            for rows_TH in hidden:
                for logits_CV in self.logits(rows_TH, chunk):
                    if capture.level == LOGITS:
                        kept.add(logits_CV)
                    else:
                        kept.add(*top_k_with_tail(logits_CV, capture.k or 1, temperature))
        if capture.level == LOGITS:
            return Logits(logits=kept.arrays[0])
        return TopK(**dict(zip(TOP_K, kept.arrays, strict=True)))


class _ChunkedArrays:
    def __init__(self, num_rows: int):
        self.arrays: list[Any] = []
        self._num_rows, self._filled = num_rows, 0

    def add(self, *chunks: Any) -> None:
        if not self.arrays:
            self.arrays = [chunk.new_empty((self._num_rows, *chunk.shape[1:])) for chunk in chunks]
        end = self._filled + len(chunks[0])
        for array, chunk in zip(self.arrays, chunks, strict=True):
            array[self._filled : end].copy_(chunk)
        self._filled = end
