"""Copy tensors to the host without blocking the training stream."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..schemas.errors import InvalidRecord


def is_tensor(value: Any) -> bool:
    """Return True if a value is a torch tensor, without importing torch."""
    return _is_of_torch(type(value)) and hasattr(value, "detach")


def _is_of_torch(kind: Any) -> bool:
    module: str = kind.__module__
    return module == "torch" or module.startswith("torch.")


def on_device(value: Any) -> bool:
    return is_tensor(value) and not value.is_cpu


def to_numpy(value: Any) -> np.ndarray:
    """Return a host tensor or array as a NumPy array, without copying if possible. 16-bit floats become float32."""
    if is_tensor(value):
        value = value.detach()
        if str(value.dtype) in ("torch.bfloat16", "torch.float16"):
            value = value.float()
        return np.asarray(value.numpy())
    return np.asarray(value)


def local_part(value: Any, what: str) -> Any:
    """Return this process's part of a DTensor, or any other value. Raises InvalidRecord if its rows are split."""
    if isinstance(value, (list, tuple)) and any(map(_is_divided, {type(item) for item in value})):
        return [local_part(item, what) for item in value]
    if not _is_divided(type(value)):
        return value
    if all(placement.is_replicate() or placement.is_shard(0) for placement in value.placements):
        return value.to_local()
    raise InvalidRecord(
        f"{what} is a DTensor with placements {tuple(value.placements)}, so no process has whole rows. Pass "
        "full_tensor(), which every process in the mesh must call"
    )


def _is_divided(kind: Any) -> bool:
    return _is_of_torch(kind) and hasattr(kind, "placements")


def stage(value: Any) -> Callable[[], Any]:
    """Start copying `value` to the host. The returned function waits until the copy is complete, then returns it.

    A CUDA tensor is first cloned in the caller's stream, then copied on a separate stream. The caller may change the
    tensor as soon as this function returns.
    """
    if is_tensor(value) and value.is_cuda:
        return _stage_cuda(value.detach())
    if isinstance(value, (list, tuple)) and any(
        issubclass(kind, (list, tuple, np.ndarray)) or _is_of_torch(kind) for kind in set(map(type, value))
    ):
        parts = [stage(item) for item in value]
        return lambda: [part() for part in parts]
    if is_tensor(value):
        copy = value.detach().to("cpu", copy=True)
    else:
        copy = value.copy() if isinstance(value, (np.ndarray, list)) else value
    return lambda: copy


def _stage_cuda(tensor: Any) -> Callable[[], Any]:
    import torch

    try:
        given = tensor.clone(memory_format=torch.contiguous_format)
    except torch.cuda.OutOfMemoryError:
        on_host = tensor.cpu()  # blocks until the device is done, but needs no device memory
        return lambda: on_host
    side, pinned = _copies_of(given.device)
    ready, done = torch.cuda.Event(), torch.cuda.Event()
    ready.record(torch.cuda.current_stream(given.device))
    room = pinned.take(given.numel() * given.element_size())

    def copy() -> Any:
        with torch.cuda.stream(side):
            side.wait_event(ready)
            if room is None:
                return given.cpu()
            room.view(given.dtype).view(given.shape).copy_(given, non_blocking=True)
            # Keep the allocator from reusing the clone's memory before the transfer is done.
            given.record_stream(side)
            done.record(side)
        return room.view(given.dtype).view(given.shape)

    if room is None:
        return copy
    host = copy()

    def wait() -> Any:
        done.synchronize()
        return host.clone()

    weakref.finalize(wait, pinned.give_back).atexit = False
    return wait


class PinnedMemory:
    """A pinned buffer that hands out consecutive pieces, and starts over once all of them have been returned.

    It is allocated only once, because allocation may block.
    """

    def __init__(self, num_bytes: int = 64 << 20):
        self.num_bytes = num_bytes
        self._memory: Any = None
        self._num_pieces = self._stop = 0
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> Any:
        import torch

        with self._lock:
            start = -(-self._stop // 16) * 16 if self._num_pieces else 0
            if not 0 < num_bytes <= self.num_bytes - start:
                return None
            if self._memory is None:
                self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._num_pieces, self._stop = self._num_pieces + 1, start + num_bytes
            return self._memory[start : self._stop]

    def give_back(self) -> None:
        with self._lock:
            self._num_pieces -= 1


@cache
def _copies_of(device: Any) -> tuple[Any, PinnedMemory]:
    import torch

    return torch.cuda.Stream(device=device), PinnedMemory()


class Staged:
    def __init__(self, what: str, **values: Any):
        self._values = values = {name: local_part(value, f"{what}, {name}") for name, value in values.items()}
        self._waiting: dict[str, Callable[[], Any]] | None = None
        self.wait = any(_any_on_device(value) for value in values.values())
        self.num_bytes = sum(_num_bytes(value) for value in values.values())

    def start(self) -> None:
        self._waiting = {name: stage(value) for name, value in self._values.items()}

    def wait_for_device(self) -> None:
        with contextlib.suppress(Exception):  # the failed call's task calls `values`, which raises the error again
            self._values, self._waiting = self.values(), None

    def values(self) -> dict[str, Any]:
        if self._waiting is None:
            return self._values
        return {name: wait() for name, wait in self._waiting.items()}


def _any_on_device(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return on_device(value)
    return any(_is_of_torch(kind) for kind in {type(item) for item in value}) and any(on_device(item) for item in value)


def _num_bytes(value: Any) -> int:
    if is_tensor(value):
        return int(value.numel() * value.element_size())
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (list, tuple)):
        return sum(8 * len(item) if isinstance(item, (list, tuple, str)) else _num_bytes(item) or 8 for item in value)
    return 0
