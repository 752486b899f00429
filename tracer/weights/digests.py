"""64-bit tensor digests, computed on the tensor's device.

Shapes: C 32-bit lanes in a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

_MASK = (1 << 64) - 1
_CHUNK_LANES = 1 << 20
_CAST_ELEMENTS = 1 << 16
_LANES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_PRIME = 0x9E3779B97F4A7C15
Digest = Any
"""An int or, on an accelerator, an int64 tensor that `resolved` converts to an int."""

_coefficients: dict[Any, Any] = {}


def digest(tensor: Any, dtype: Any = None, device: Any = None, *, through: Any = None) -> Digest:
    """Return a tensor's digest, after rounding its values to `dtype` and moving it to `device`, if given.

    On a CPU, the digest is the XXH3-64 hash of the tensor's bytes. On an accelerator, it is a sum modulo 2^64 over
    32-bit lanes, each multiplied by an odd number that depends on the lane's position. Digests from different device
    types cannot be compared. If `through` is given, values are rounded to that dtype first, and then to `dtype`.
    """
    tensor = tensor.detach()
    if device is None or tensor.device.type == device.type:
        device = tensor.device
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    if device.type != "cpu":
        return _sum(tensor, dtype, device, through)
    if tensor.numel() <= _CAST_ELEMENTS and dtype.itemsize in _LANES and through is None:
        return _of_few(tensor.to(device), dtype)
    return _of_bytes(tensor, dtype, through)


def resolved(digests: Sequence[Digest]) -> list[int]:
    """Return digests as unsigned 64-bit integers. Digests on an accelerator are copied in a single transfer."""
    import torch

    places = [index for index, value in enumerate(digests) if not isinstance(value, int)]
    found = [value if isinstance(value, int) else 0 for value in digests]
    if places:
        values = torch.stack([digests[index] for index in places]).cpu().tolist()
        for index, value in zip(places, values, strict=True):
            found[index] = value & _MASK
    return found


def _of_few(tensor: Any, dtype: Any) -> int:
    import torch

    cast = tensor.to(dtype).contiguous()
    return xxhash.xxh3_64_intdigest(cast.view(getattr(torch, _LANES[dtype.itemsize])).numpy())


def _of_bytes(tensor: Any, dtype: Any, through: Any = None) -> int:
    """Cast a tensor to `dtype` in pieces that fit into the CPU cache, and hash the resulting bytes."""
    import torch

    found = xxhash.xxh3_64()
    for piece in _runs(tensor, _CAST_ELEMENTS):
        found.update(_cast(piece, dtype, through).cpu().view(torch.uint8).numpy())
    return found.intdigest()


def _sum(tensor: Any, dtype: Any, device: Any, through: Any = None) -> Any:
    import torch

    if device not in _coefficients:
        _coefficients[device] = _odd_numbers(device)
    coefficients_C = _coefficients[device]
    total = torch.full((), tensor.numel() * dtype.itemsize + 1, dtype=torch.int64, device=device)
    for piece in _pieces(tensor, _CHUNK_LANES * 4 // dtype.itemsize):
        bytes_ = _cast(piece.to(device), dtype, through).view(torch.uint8)
        if bytes_.numel() % 4:
            bytes_ = torch.nn.functional.pad(bytes_, (0, -bytes_.numel() % 4))
        elif bytes_.storage_offset() % 4:
            bytes_ = bytes_.clone()  # reading lanes requires aligned memory
        lanes_C = bytes_.view(torch.int32)
        total = total * _signed(_PRIME) + (lanes_C * coefficients_C[: lanes_C.numel()]).sum()
    return total


def _cast(piece: Any, dtype: Any, through: Any) -> Any:
    return (piece if through is None else piece.to(through).to(piece.dtype)).to(dtype)


def _runs(tensor: Any, most: int) -> Iterator[Any]:
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(most)
    elif tensor[0].numel() > most:
        for part in tensor:
            yield from _runs(part, most)
    else:
        for rows in tensor.split(max(1, most // tensor[0].numel())):
            yield rows.reshape(-1).contiguous()


def _pieces(tensor: Any, most: int) -> Iterator[Any]:
    """Yield a tensor in flat pieces of exactly `most` elements. The last piece may be shorter."""
    import torch

    held: list[Any] = []
    room = most
    for run in _runs(tensor, most):
        while len(run):
            held.append(run[:room])
            run = run[room:]
            room -= len(held[-1])
            if not room:
                yield held[0] if len(held) == 1 else torch.cat(held)
                held, room = [], most
    if held:
        yield held[0] if len(held) == 1 else torch.cat(held)


def _odd_numbers(device: Any) -> Any:
    """Return [C] odd int64 coefficients, computed from the splitmix64 hash of each lane's position."""
    import torch

    z = (torch.arange(_CHUNK_LANES, dtype=torch.int64, device=device) + 1) * _signed(_PRIME)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Any, places: int) -> Any:
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
