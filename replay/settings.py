"""Torch's switches as a pass had them, for as long as it is replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from ..schemas.contract import Contract
from ..tracer.environment import torch_settings
from .arms import Arm

_SDP = {"sdp_flash": "flash", "sdp_mem_efficient": "mem_efficient", "sdp_math": "math", "sdp_cudnn": "cudnn"}
_SWITCHES = ("float32_matmul_precision", "deterministic_algorithms", "num_threads", "mkldnn", *_SDP)
"""Those of the recorded settings that can be set again."""


def autocast_dtype(contract: Contract) -> Any:
    """The dtype that a recorded pass's autocast computed in, or None: in float32 it does nothing. Needs torch."""
    import torch

    name = str(contract["torch"].get("autocast_dtype")).removeprefix("torch.")
    return None if name in ("None", "float32") else getattr(torch, name)


def autocast(device: Any, dtype: Any) -> Any:
    """A context of autocast to a dtype, torch's; one of nothing without."""
    import torch

    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def settings(recorded: Mapping[str, Any], arm: Arm) -> Iterator[None]:
    """Set what the recorded pass had, changed by the arm, and put everything back."""
    import torch

    now = torch_settings()
    before = {name: now[name] for name in _SWITCHES}
    _apply({name: recorded[name] for name in _SWITCHES if recorded.get(name) is not None})
    try:
        if arm.threads is not None:
            torch.set_num_threads(arm.threads)
        if arm.deterministic:
            torch.use_deterministic_algorithms(True)
        if arm.dtype is not None:
            tf32 = arm.dtype == "tf32"
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        yield
    finally:
        _apply(before)


def _apply(values: Mapping[str, Any]) -> None:
    import torch

    cuda, now = torch.backends.cuda, torch_settings()
    for name, value in values.items():
        if value == now[name]:
            continue
        if name == "float32_matmul_precision":
            torch.set_float32_matmul_precision(value)
        elif name == "deterministic_algorithms":
            torch.use_deterministic_algorithms(value)
        elif name == "num_threads":
            torch.set_num_threads(value)
        elif name == "mkldnn":
            torch.backends.mkldnn.enabled = value
        else:
            getattr(cuda, f"enable_{_SDP[name]}_sdp")(value)
