"""The recorded weights rounded (to nearest even) to a smaller dtype, as an engine of that dtype loads them.

An optimizer changes a float32 master slightly at every step; in its bfloat16 cast, which the engine loads, most elements stay
the same (arXiv 2602.03839).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..replay.arms import DTYPES
from ..replay.backends.model import to_torch
from ..schemas.errors import InvalidOption
from ..schemas.weights import ITEM_BYTES
from ..tracer.weights.checkpoints import CheckpointReader
from ..tracer.weights.reader import Tensor, WeightReader


def torch_name(dtype: str) -> str:
    """Return the name in torch for a value of `--dtype`. Raises InvalidOption."""
    if dtype not in ("fp32", "bf16", "fp16"):
        raise InvalidOption(f"got {dtype!r}; use fp32, bf16 or fp16", option="dtype")
    return DTYPES[dtype]


def rounded(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Cast tensors to a dtype (torch's name); tied tensors stay tied, and integer tensors are unchanged."""
    import torch

    made: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in made:
            values = to_torch(tensor)
            if not values.is_floating_point():
                made[id(tensor)] = tensor
                continue
            bits = values.to(getattr(torch, dtype)).contiguous().view(_bits_dtype(dtype))
            made[id(tensor)] = Tensor(dtype, bits.numpy())
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def changes(reader: WeightReader | CheckpointReader, dtype: str) -> Iterator[tuple[int, int, int, float | None]]:
    """Yield (version, number of elements, bytes when stored in `dtype`, share of elements that differ after rounding).

    The share is None if the previous version is missing.
    """
    before: dict[str, Tensor] = {}
    last: int | None = None
    for version in reader.versions:
        tensors = rounded(reader.load(version), dtype)
        single = {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values()
        elements = sum(tensor.bits.size for _, tensor in single)
        num_bytes = sum(tensor.bits.size * ITEM_BYTES[tensor.dtype] for _, tensor in single)
        share = None
        if last == version - 1:
            changed = sum(int(np.count_nonzero(tensor.bits != before[name].bits)) for name, tensor in single)
            share = changed / elements if elements else None
        yield version, elements, num_bytes, share
        before, last = tensors, version


def _bits_dtype(dtype: str) -> object:
    import torch

    return {2: torch.uint16, 4: torch.uint32}[ITEM_BYTES[dtype]]
