from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import CannotReplay
from ...tracer.hooks.patches import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    implementation: str = "sdpa"
    """transformers' name for the attention implementation (`sdpa` is torch's scaled_dot_product_attention)."""
    backend: str | None = None
    """Member of torch's SDPBackend, or None if torch may choose any backend."""
    needs_cuda: bool = False
    shares_heads: bool = True
    rounds_scores: bool = True
    """True if scores and softmax may be rounded to the activations' dtype."""


KERNELS = {
    "eager": Kernel(implementation="eager"),
    "math": Kernel(backend="MATH"),
    "flash": Kernel(backend="FLASH_ATTENTION", rounds_scores=False),
    "efficient": Kernel(backend="EFFICIENT_ATTENTION", needs_cuda=True, shares_heads=False, rounds_scores=False),
    "cudnn": Kernel(backend="CUDNN_ATTENTION", needs_cuda=True, rounds_scores=False),
    "flex": Kernel(implementation="flex_attention"),
}


@contextmanager
def forced(attention: str | None) -> Iterator[None]:
    """Restrict scaled_dot_product_attention to one kernel. Raises CannotReplay if that kernel cannot run."""
    kernel = Kernel() if attention is None else KERNELS[attention]
    if kernel.backend is None:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations import sdpa_attention

    # If the kernel lacks grouped-query attention, let transformers repeat keys and values for each query head.
    shares = nullcontext() if kernel.shares_heads else replaced(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False)
    try:
        with sdpa_kernel([getattr(SDPBackend, kernel.backend)]), shares:
            yield
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        raise CannotReplay(
            f"attention {attention}: torch has no such kernel for this model, mask, dtype and device; use math (always "
            f"available) or eager"
        ) from error


@contextmanager
def observed(found: set[str]) -> Iterator[None]:
    import torch

    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention
    names = {
        getattr(torch.nn.attention.SDPBackend, kernel.backend).value: name
        for name, kernel in KERNELS.items()
        if kernel.backend is not None
    }

    def watching(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        chosen = torch._fused_sdp_choice(query, key, value, **call)
        found.add(f"sdpa {names.get(chosen, chosen)}")
        return original(query, key, value, *args, **kwargs)

    with replaced(functional, "scaled_dot_product_attention", watching):
        yield
