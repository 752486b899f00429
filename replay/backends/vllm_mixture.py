"""A mixture of experts in vLLM: its router and its experts under transformers' names, and its weights out of their packing.

vLLM computes a mixture in one module, which chooses experts by an object of its own and multiplies with the weights of all experts at once.

Shapes: W tokens of a forward, E experts, J experts of a token, H hidden width, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...schemas.errors import CannotReplay, option

MODELS = ("Qwen3MoeForCausalLM",)
"""Those whose modules have transformers' names, and whose experts are all of their MLP."""
_DIGIT = 256
"""Whole numbers below it are numbers of every dtype that weights have."""
_DIGITS = 4


def check_mixture(identity: Mapping[str, Any], arm: str) -> None:
    """Raise CannotReplay for a mixture whose modules in vLLM are not known here; `identity` is what the trace says of the model."""
    name = str(identity.get("class", "")).rpartition(".")[2]
    if name not in MODELS:
        raise CannotReplay(
            f"arm {arm}: of mixtures of experts the modules of {', '.join(MODELS)} are known in vLLM, and this model is "
            f"{name or 'unnamed'}; compare arms of {option('engine', 'hf')}"
        )


def is_mixture(module: Any) -> bool:
    """Whether a module of vLLM's computes a mixture."""
    return hasattr(module, "router") and hasattr(module, "routed_experts")


def mixtures(model: Any) -> dict[str, Any]:
    """Name -> module of a model's mixtures, by layer."""
    return {name: module for name, module in model.named_modules() if is_mixture(module)}


def names_of(name: str, module: Any) -> list[str]:
    """What transformers has in the place of vLLM's mixture: its router, and its experts. Raises CannotReplay."""
    if module.routed_experts.quant_method.is_monolithic:
        raise CannotReplay(
            f"engine vllm: the kernel of {name} ({type(module.routed_experts.quant_method).__name__}) chooses experts itself, so that its "
            f"router cannot be heard; compare arms of {option('engine', 'hf')}"
        )
    if module.shared_experts is not None:
        raise CannotReplay(
            f"engine vllm: {name} adds shared experts to the chosen ones, and the two cannot be told apart; compare arms of "
            f"{option('engine', 'hf')}"
        )
    return [f"{name.rpartition('.')[0]}.gate", name]


Select = Callable[[Any, Any], tuple[Any, Any]]
"""Hidden states [W, H] and logits [W, E] -> weights [W, J] float32 and experts [W, J] int32."""


@contextmanager
def selecting(module: Any, around: Callable[[Select, Any, Any], tuple[Any, Any]]) -> Iterator[None]:
    """Within it a mixture's choice of experts is called through `around`."""
    router = module.router
    original = router.select_experts

    def select(hidden_states: Any, router_logits: Any, *args: Any, **words: Any) -> tuple[Any, Any]:
        def own(hidden: Any, logits: Any) -> tuple[Any, Any]:
            found: tuple[Any, Any] = original(hidden, logits, *args, **words)
            return found

        return around(own, hidden_states, router_logits)

    router.select_experts = select
    try:
        yield
    finally:
        del router.select_experts


def in_order(weights_WJ: Any, experts_WJ: Any) -> tuple[Any, Any]:
    """Weights and experts (int64), the heaviest first, as transformers' routers give them."""
    sorted_WJ, order_WJ = weights_WJ.sort(dim=-1, descending=True, stable=True)
    return sorted_WJ, experts_WJ.long().gather(-1, order_WJ)


def held_by(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """The weights of all experts, [E, 2 I, H] and [E, H, I], by transformers' names; none where their packing is not known."""
    experts = module.routed_experts
    inner = int(experts.moe_config.intermediate_size_per_partition)
    first, second = (_unpacked(getattr(experts, weight), experts) for weight in ("w13_weight", "w2_weight"))
    if first is None or second is None:
        return
    gate, up = first.chunk(2, dim=1)  # each is filled up to what the kernel takes
    import torch

    yield f"{name}.gate_up_proj", torch.cat((gate[:, :inner], up[:, :inner]), dim=1)
    yield f"{name}.down_proj", second[:, :, :inner]


def _unpacked(weight: Any, experts: Any) -> Any:
    """Weights as they were loaded, out of the order that vLLM's kernel for a CPU has them in; None where that does not come back.

    The packing itself says where it puts each number: places are packed, a digit at a time, in the weights' dtype.
    """
    import torch

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
    is_back = bool((cpu_prepack_moe_weight(loaded, kernel.isa) == value).all())
    return loaded if is_back else None
