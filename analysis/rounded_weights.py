"""The recorded weights as an engine of a smaller dtype has them: the trainer's own, rounded to nearest even.

An optimizer moves a float32 master a little at every step; its bfloat16 cast, which the engine loads, stays equal in most
elements (arXiv 2602.03839).
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
    """torch's name of a dtype as `--dtype` takes it. Raises InvalidOption."""
    if dtype not in ("fp32", "bf16", "fp16"):
        raise InvalidOption(f"got {dtype!r}; use fp32, bf16 or fp16", option="dtype")
    return DTYPES[dtype]


def rounded(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Tensors in a dtype, torch's name of it; tied ones stay one, and what holds no fractions stays as it is."""
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
    """Of every version: its number, elements, bytes in a dtype, and the share of elements that changed once rounded.

    The share is None where the version before is not there.
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
