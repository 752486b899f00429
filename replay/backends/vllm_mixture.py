"""Map vLLM's mixture-of-experts layers to transformers' modules and weights. In vLLM, one module and one tensor hold
all experts.

Shapes: W tokens in a forward pass, E experts, J experts selected per token, H hidden width, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...schemas.errors import CannotReplay, option

MODELS = ("Qwen3MoeForCausalLM",)
"""Models with the same module names in vLLM and transformers. Their MLPs contain only experts."""
_DIGIT = 256
"""Base in which element indices are encoded. Every weight dtype represents all digits of this base exactly."""
_DIGITS = 4


def check_mixture(identity: Mapping[str, Any], arm: str) -> None:
    name = str(identity.get("class", "")).rpartition(".")[2]
    if name not in MODELS:
        raise CannotReplay(
            f"arm {arm}: {name or 'this model'} cannot be compared in vLLM (supported mixture-of-experts models: "
            f"{', '.join(MODELS)}); compare arms with {option('engine', 'hf')}"
        )


def is_mixture(module: Any) -> bool:
    return hasattr(module, "router") and hasattr(module, "routed_experts")


def mixtures(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_mixture(module)}


def names_of(name: str, module: Any) -> list[str]:
    method = module.routed_experts.quant_method
    if method.is_monolithic:
        kernel = f"the kernel of {name} ({type(method).__name__})"
        why = f"{kernel} selects experts itself, so its router cannot be observed"
    elif module.shared_experts is not None:
        why = f"{name} adds the outputs of shared and selected experts, which cannot be separated"
    else:
        return [f"{name.rpartition('.')[0]}.gate", name]
    raise CannotReplay(f"engine vllm: {why}; compare arms with {option('engine', 'hf')}")


def in_order(weights_WJ: Any, experts_WJ: Any) -> tuple[Any, Any]:
    """Sort weights and experts (int64) by descending weight, as transformers' routers do."""
    sorted_WJ, order_WJ = weights_WJ.sort(dim=-1, descending=True, stable=True)
    return sorted_WJ, experts_WJ.long().gather(-1, order_WJ)


def held_by(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the experts' stacked weights under their transformers names: gate_up_proj [E, 2 I, H], down_proj [E, H, I].
    Yields nothing if the packing is unknown."""
    experts = module.routed_experts
    inner = int(experts.moe_config.intermediate_size_per_partition)
    first, second = (_unpacked(getattr(experts, weight), experts) for weight in ("w13_weight", "w2_weight"))
    if first is None or second is None:
        return
    gate, up = first.chunk(2, dim=1)  # vLLM pads both for its kernel
    yield f"{name}.gate_up_proj", torch.cat((gate[:, :inner], up[:, :inner]), dim=1)
    yield f"{name}.down_proj", second[:, :, :inner]


def _unpacked(weight: Any, experts: Any) -> Any:
    """Return the weight without vLLM's packing, or None if the packing is unknown. On CPU, packing permutes elements.
    The permutation is found by packing the elements' own indices, one digit at a time."""
    value = weight.detach()
    if value.device.type != "cpu":
        return value if experts.quant_method.unquantized_backend.name == "TRITON" else None
    kernel = experts.quant_method.moe_kernel.fused_experts
    if getattr(kernel, "_use_zentorch", True):
        return None
    from vllm._custom_ops import cpu_prepack_moe_weight

    number = value[0].numel()
    places = torch.arange(number).view(1, *value.shape[1:])
    found = torch.zeros(number, dtype=torch.int64)
    for digit in range(_DIGITS):
        of_digit = (places // _DIGIT**digit) % _DIGIT
        found += cpu_prepack_moe_weight(of_digit.to(value.dtype), kernel.isa).flatten().long() * _DIGIT**digit
    loaded = torch.empty_like(value)
    loaded.flatten(1)[:, found] = value.flatten(1)
    return loaded if bool((cpu_prepack_moe_weight(loaded, kernel.isa) == value).all()) else None
