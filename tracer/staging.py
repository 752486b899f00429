"""Getting tensors to the host without holding the training stream up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_FLOATS_TO_WIDEN = ("torch.bfloat16", "torch.float16")


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; torch itself is never imported for the answer."""
    return _is_of_torch(type(value)) and hasattr(value, "detach")


def _is_of_torch(kind: Any) -> bool:
    module: str = kind.__module__
    return module == "torch" or module.startswith("torch.")


def on_device(value: Any) -> bool:
    """Whether `value` is a tensor whose numbers are not in host memory."""
    return is_tensor(value) and not value.is_cpu


def to_numpy(value: Any) -> np.ndarray:
    """View a host tensor or array as NumPy, without copying where the dtype allows; half floats widen exactly."""
    if is_tensor(value):
        value = value.detach()
        if str(value.dtype) in _FLOATS_TO_WIDEN:
            value = value.float()
        return np.asarray(value.numpy())
    return np.asarray(value)


def stage(value: Any) -> Callable[[], Any]:
    """Start copying `value` to the host and return what waits for the copy and gives it.

    A device tensor is copied on a stream of its own into pinned memory: the caller's stream goes on, and only the
    thread that asks for the numbers waits. Everything else is copied at once, since the caller may change it.
    """
    if on_device(value) and value.device.type == "cuda":
        return _stage_cuda(value.detach())
    if on_device(value):
        host = value.detach().to("cpu")
        return lambda: host
    if is_tensor(value):
        copy = value.detach().clone()
        return lambda: copy
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: array
    if isinstance(value, (list, tuple)) and any(on_device(item) for item in value):
        parts = [stage(item) for item in value]
        return lambda: [part() for part in parts]
    return lambda: value


def _stage_cuda(tensor: Any) -> Callable[[], Any]:
    import torch

    side = _side_stream(tensor.device)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(side):
        side.wait_event(ready)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        # The allocator may hand the tensor's memory out again only after this copy.
        tensor.record_stream(side)
        done = torch.cuda.Event()
        done.record(side)

    def wait() -> Any:
        done.synchronize()
        return host

    return wait


_SIDE_STREAMS: dict[Any, Any] = {}


def _side_stream(device: Any) -> Any:
    import torch

    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device=device)
    return _SIDE_STREAMS[device]


class Staged:
    """Values that are handed over to the writing thread, some of them on their way from a device."""

    def __init__(self, **values: Any):
        self._values = values
        self._waiting: dict[str, Callable[[], Any]] | None = None
        self.wait = any(_any_on_device(value) for value in values.values())
        self.num_bytes = sum(_num_bytes(value) for value in values.values())

    def start(self) -> None:
        """Begin the copies."""
        self._waiting = {name: stage(value) for name, value in self._values.items()}

    def values(self) -> dict[str, Any]:
        """Every value, on the host."""
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
        kinds = {type(item) for item in value}
        if kinds == {np.ndarray}:
            return int(sum(item.nbytes for item in value))
        if kinds == {str}:
            return 8 * sum(map(len, value))
        if len(kinds) == 1 and is_tensor(value[0]):
            return int(sum(item.numel() for item in value) * value[0].element_size())
        return sum(8 * len(item) if isinstance(item, (list, tuple, str)) else _num_bytes(item) or 8 for item in value)
    return 0
