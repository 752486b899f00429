"""Which attention kernel runs, forced or observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ...schemas.errors import CannotReplay

_NAMES = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
_CUDA_ONLY = ("efficient", "cudnn")


def check(attention: str | None, device: str) -> None:
    """Raise CannotReplay for a kernel that the device lacks."""
    if attention in _CUDA_ONLY and not device.startswith("cuda"):
        raise CannotReplay(
            f"attention {attention}: needs an NVIDIA GPU, and this replay runs on the CPU; here work eager, math, "
            "flash and flex"
        )


@contextmanager
def forced(attention: str | None) -> Iterator[None]:
    """Let scaled_dot_product_attention use one kernel alone; it raises where that one cannot serve."""
    if attention not in _NAMES:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    grouped = _heads_repeated() if attention == "efficient" else nullcontext()
    try:
        with sdpa_kernel([getattr(SDPBackend, _NAMES[attention])]), grouped:
            yield
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        raise CannotReplay(
            f"attention {attention}: torch has no such kernel for this model, mask, dtype and device; try math, which "
            "always works, or eager"
        ) from error


@contextmanager
def _heads_repeated() -> Iterator[None]:
    """Let transformers give each query head its own copy of its keys and values, for a kernel that cannot share them."""
    from transformers.integrations import sdpa_attention

    name = "use_gqa_in_sdpa"
    shares = getattr(sdpa_attention, name, None)
    if shares is None:  # a release that always repeats them
        yield
        return
    setattr(sdpa_attention, name, lambda *_: False)
    try:
        yield
    finally:
        setattr(sdpa_attention, name, shares)


@contextmanager
def observed(found: set[str]) -> Iterator[None]:
    """Note the kernel that scaled_dot_product_attention chooses, by torch's own choice for the same arguments."""
    import torch

    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention
    names = {number.value: name for name, number in _backends().items()}

    def watching(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        chosen = torch._fused_sdp_choice(query, key, value, **call)
        found.add(f"sdpa {names.get(chosen, chosen)}")
        return original(query, key, value, *args, **kwargs)

    functional.scaled_dot_product_attention = watching
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _backends() -> dict[str, Any]:
    from torch.nn.attention import SDPBackend

    return {name: getattr(SDPBackend, attribute) for name, attribute in _NAMES.items()}
