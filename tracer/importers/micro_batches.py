"""Read prime-rl's `rollouts/step_<N>/rank_<r>.bin`: a msgpack list of micro-batches.

The fields and their order are those of `MicroBatch` in prime-rl's src/prime_rl/transports/rollouts/types.py (559b447).
Fields that are not imported stay undecoded, and micro-batches are decoded one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...schemas.errors import ImportFailed
from .textfiles import whole_content

_LEAST_BYTES = 10
"""Size in bytes of the smallest possible micro-batch, a list of nine empty fields."""
_TIMES = 34
"""Maximum memory for a decoded micro-batch, as a multiple of its size in the file. A number that takes one byte in
the file takes 32 bytes as a Python float in a list."""


class _RoutedExperts(msgspec.Struct, array_like=True):
    data: bytes
    shape: list[int]
    dtype: str


class _MicroBatch(msgspec.Struct, array_like=True):
    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: msgspec.Raw
    temperatures: list[float]
    env_names: msgspec.Raw
    seq_lens: msgspec.Raw
    ref_logprobs: list[float] | None = None
    routed_experts: _RoutedExperts | None = None


_READ = ("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "temperatures", "ref_logprobs")
_LIST, _ONE = msgspec.msgpack.Decoder(list[msgspec.Raw]), msgspec.msgpack.Decoder(_MicroBatch)


def read_micro_batches(path: Path, _first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each micro-batch's number and fields. Raises ImportFailed if the file is incomplete or malformed."""
    content = whole_content(path, _TIMES)
    where = str(path)
    try:
        if _num_items(content) * _LEAST_BYTES > len(content):
            raise msgspec.DecodeError("the file contains fewer micro-batches than its header states")
        for number, raw in enumerate(_LIST.decode(content), start=1):
            where = f"{path}, micro-batch {number}"
            batch = _ONE.decode(raw)
            record = {name: getattr(batch, name) for name in _READ}
            yield number, record | {"routed_experts": _experts(batch.routed_experts, where)}
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ImportFailed(
            f"{where} cannot be decoded as prime-rl micro-batches ({error}). Copy the file again, or import "
            "another format"
        ) from error


def _num_items(content: bytes) -> int:
    """Return the length in the header of a msgpack list, or 0 for any other value."""
    code = content[0] if content else 0
    width = {0xDC: 2, 0xDD: 4}.get(code, 0)
    return code & 0x0F if code >> 4 == 9 else int.from_bytes(content[1 : 1 + width], "big")


def _experts(found: _RoutedExperts | None, where: str) -> np.ndarray | None:
    """Return router choices [tokens, layers, slots], or None if the micro-batch has none."""
    if found is None:
        return None
    size = {"uint8": 1, "int16": 2, "int32": 4}.get(found.dtype)
    is_whole = len(found.shape) == 3 and min(found.shape) >= 0
    if size is None or not is_whole or math.prod(found.shape) * size != len(found.data):
        told = f"{len(found.data):,} bytes of {found.dtype!r:.40} for shape {found.shape!s:.80}"
        raise ImportFailed(f"{where}: routed_experts has {told}")
    return np.frombuffer(found.data, found.dtype).reshape(found.shape)
