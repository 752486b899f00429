from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from ..schemas.documents import Contract
from ..schemas.errors import warn
from ..tracer.environment import torch_settings
from .arms import Arm

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_FOR_DETERMINISM = ":4096:8"
"""Value that torch requires for deterministic cuBLAS. It has no effect on CPU."""
_cuda_began: list[str | None] = []
"""Value of CUBLAS_WORKSPACE_CONFIG when CUDA started in this process. The list is empty until then."""


def switches() -> dict[str, Callable[[Any], object]]:
    """Return a setter for each recorded setting, in the order in which to apply them."""
    cuda, cudnn, matmul = torch.backends.cuda, torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "fp32_precision": partial(setattr, torch.backends, "fp32_precision"),
        "cuda_matmul_fp32_precision": partial(setattr, matmul, "fp32_precision"),
        "float32_matmul_precision": torch.set_float32_matmul_precision,
        "deterministic_algorithms": torch.use_deterministic_algorithms,
        "num_threads": torch.set_num_threads,
        "mkldnn": partial(setattr, torch.backends.mkldnn, "enabled"),
        "cudnn_allow_tf32": partial(setattr, cudnn, "allow_tf32"),
        "cuda_bf16_reduced_precision_reduction": partial(setattr, matmul, "allow_bf16_reduced_precision_reduction"),
        "cuda_fp16_reduced_precision_reduction": partial(setattr, matmul, "allow_fp16_reduced_precision_reduction"),
        "cudnn_deterministic": partial(setattr, cudnn, "deterministic"),
        "cudnn_benchmark": partial(setattr, cudnn, "benchmark"),
        "cuda_preferred_blas": cuda.preferred_blas_library,
        "cuda_preferred_linalg": cuda.preferred_linalg_library,
        "sdp_flash": cuda.enable_flash_sdp,
        "sdp_mem_efficient": cuda.enable_mem_efficient_sdp,
        "sdp_math": cuda.enable_math_sdp,
        "sdp_cudnn": cuda.enable_cudnn_sdp,
    }


def autocast_dtype(contract: Contract) -> Any:
    """Return a recorded pass's autocast dtype, or None if autocast was off or had no effect (float32)."""
    name = str(contract["torch"].get("autocast_dtype")).removeprefix("torch.")
    return None if name in ("None", "float32") else getattr(torch, name)


def autocast(device: Any, dtype: Any) -> Any:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def cublas_workspace(recorded: Mapping[str, Any], arm: Arm) -> Iterator[None]:
    """Set CUBLAS_WORKSPACE_CONFIG as recorded, or for determinism. CUDA reads it only once, at startup."""
    before = os.environ.get(CUBLAS)
    wanted = recorded.get("cublas_workspace_config", before)
    if arm.deterministic or (wanted is None and recorded.get("deterministic_algorithms")):
        wanted = wanted or before or _FOR_DETERMINISM
    if torch.cuda.is_initialized():
        _cuda_began[:] = _cuda_began or [before]
        if wanted != _cuda_began[0]:
            began = "without it" if _cuda_began[0] is None else f"with {_cuda_began[0]}"
            warn(
                f"arm {arm.name}: {CUBLAS} is {wanted or 'not set'} for this arm, but CUDA started {began} in this "
                "process. If bitwise equality matters, replay this arm in a separate process",
            )
    _set_variable(wanted)
    try:
        yield
    finally:
        if torch.cuda.is_initialized() and not _cuda_began:
            _cuda_began.append(wanted)
        _set_variable(before)


def _set_variable(value: str | None) -> None:
    os.environ.pop(CUBLAS, None)
    os.environ.update({} if value is None else {CUBLAS: value})


@contextmanager
def settings(recorded: Mapping[str, Any], arm: Arm) -> Iterator[None]:
    before = torch_settings()
    with cublas_workspace(recorded, arm):
        try:
            _apply(recorded)
            if arm.threads is not None:
                torch.set_num_threads(arm.threads)
            if arm.deterministic:
                torch.use_deterministic_algorithms(True)
            if arm.dtype is not None:
                torch.set_float32_matmul_precision("high" if arm.dtype == "tf32" else "highest")
            yield
        finally:
            _apply(before)


def used_settings(recorded: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    with settings(recorded, arm):
        found = torch_settings()
    return found | ({"cublas_workspace_config": _cuda_began[0]} if _cuda_began else {})


def _apply(values: Mapping[str, Any]) -> None:
    for name, change in switches().items():
        value = values.get(name)
        if value is None or str(value).startswith("unreadable") or value == torch_settings()[name]:
            continue
        # Ignore an error here, because torch builds without CUDA lack some of these libraries. The arm's contract
        # records the library in use.
        with suppress(RuntimeError):
            change(value)
