"""Torch's collectives, which must not be called inside recording."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tim_trace.tracer.hooks.session import Session
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_WORDS = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter",
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier", "new_group", "split_group",
)  # fmt: skip


class CollectiveInRecording(BaseException):
    """No Exception: no guard may take it for an error of recording and go on."""


def names(module: object) -> list[str]:
    """The functions of a module that make processes meet."""
    found = [name for name in dir(module) if name.startswith(_WORDS) and callable(getattr(module, name))]
    return [name for name in found if not isinstance(getattr(module, name), type)]


class _Dispatched(TorchDispatchMode):
    """Refuses the operators by which functional collectives, DTensor and FSDP meet, whoever calls them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"):
            raise CollectiveInRecording(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Have every collective of this thread raise."""

    def refusing(name: str) -> object:
        def refuse(*_: object, **__: object) -> None:
            raise CollectiveInRecording(name)

        return refuse

    with contextlib.ExitStack() as stack:
        owners = [(module, name) for module in (dist, dist.distributed_c10d, functional) for name in names(module)]
        for owner, name in (*owners, (DTensor, "full_tensor"), (DTensor, "redistribute")):
            stack.enter_context(mock.patch.object(owner, name, refusing(name)))
        stack.enter_context(_Dispatched())
        yield


def refuse_in_guards() -> None:
    """Have collectives raise wherever a hook's guard is active, until the process ends."""
    guarded = Session.guard

    @contextlib.contextmanager
    def guard(self: Session, *args: object, **kwargs: object) -> Iterator[None]:
        with guarded(self, *args, **kwargs), refused():
            yield

    Session.guard = guard  # type: ignore[method-assign]
