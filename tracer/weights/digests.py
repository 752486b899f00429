"""Digests of tensors: 64 bits that are equal where the tensors' bits are, taken where the tensors lie.

Shapes: N 32-bit lanes of a tensor, C lanes of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

_MASK = (1 << 64) - 1
_CHUNK_LANES = 1 << 22
_CAST_ELEMENTS = 1 << 16
_LANES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Bytes of an element -> integers of torch that NumPy has, too."""
_PRIME = 0x9E3779B97F4A7C15
Digest = Any
"""An int, or on an accelerator a tensor of one int64 that `resolved` reads with the others."""

_coefficients: dict[Any, Any] = {}


def digest(tensor: Any, dtype: Any = None, device: Any = None) -> Digest:
    """The digest of a tensor of torch, rounded to a floating `dtype` and moved to a device before, where these are given.

    On a CPU it is XXH3-64 of the bytes. Elsewhere it is a sum over the bytes as 32-bit lanes, each times an odd number of
    its place, modulo 2^64: nothing but the sum leaves the device. Only digests of one kind of device compare.
    """
    tensor = tensor.detach()
    if device is not None and tensor.device.type != device.type:
        tensor = tensor.to(device)
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    if tensor.device.type == "cpu" and tensor.numel() <= _CAST_ELEMENTS and dtype.itemsize in _LANES:
        return _of_few(tensor, dtype)
    flat = tensor.contiguous().view(-1)
    return _of_bytes(flat, dtype) if flat.device.type == "cpu" else _sum(flat.to(dtype))


def resolved(digests: Sequence[Digest]) -> list[int]:
    """Digests as whole numbers from 0 to 2^64 - 1; one copy for those of all tensors on an accelerator."""
    import torch

    places = [index for index, value in enumerate(digests) if not isinstance(value, int)]
    found = [value if isinstance(value, int) else 0 for value in digests]
    if places:
        values = torch.stack([digests[index] for index in places]).cpu().tolist()
        for index, value in zip(places, values, strict=True):
            found[index] = value & _MASK
    return found


def _of_few(tensor: Any, dtype: Any) -> int:
    """What `_of_bytes` gives of a small tensor in fewer calls: a model of small tensors is made of little else."""
    import torch

    cast = tensor.to(dtype).contiguous()
    return xxhash.xxh3_64_intdigest(cast.view(getattr(torch, _LANES[dtype.itemsize])).numpy())


def _of_bytes(flat: Any, dtype: Any) -> int:
    """The digest of a cast that is never there as a whole: a piece stays in the processor's cache."""
    import torch

    found = xxhash.xxh3_64()
    for piece in flat.split(_CAST_ELEMENTS):
        found.update(piece.to(dtype).view(torch.uint8).numpy())
    return found.intdigest()


def _sum(flat: Any) -> Any:
    """The sum over lanes, wrapping as int64 does."""
    import torch

    bytes_ = flat.view(torch.uint8) if flat.numel() else flat.new_zeros(0, dtype=torch.uint8)
    if bytes_.numel() % 4:
        bytes_ = torch.nn.functional.pad(bytes_, (0, -bytes_.numel() % 4))
    lanes_N = bytes_.view(torch.int32)
    if flat.device not in _coefficients:
        _coefficients[flat.device] = _odd_numbers(flat.device)
    coefficients_C = _coefficients[flat.device]
    total = torch.full((), flat.numel() + 1, dtype=torch.int64, device=flat.device)
    for start in range(0, lanes_N.numel(), _CHUNK_LANES):
        lanes_C = lanes_N[start : start + _CHUNK_LANES]
        total = total * _signed(_PRIME) + (lanes_C * coefficients_C[: lanes_C.numel()]).sum()
    return total


def _odd_numbers(device: Any) -> Any:
    """[C] int64: splitmix64 of the place, made odd."""
    import torch

    z = (torch.arange(_CHUNK_LANES, dtype=torch.int64, device=device) + 1) * _signed(_PRIME)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Any, places: int) -> Any:
    """A logical shift to the right."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
