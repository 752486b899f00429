from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ...schemas.errors import CannotReplay
from ...tracer.store import first_line
from ...tracer.weights.chunks import bits_type
from ...tracer.weights.reader import Tensor

PREFIX = "base_model.model."

_Names = Annotated[list[str], msgspec.Meta(max_length=100_000)] | Annotated[str, msgspec.Meta(max_length=10_000)] | None


class _Lora(msgspec.Struct, forbid_unknown_fields=False):
    peft_type: Literal["LORA"]
    r: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 8
    lora_alpha: float = 8.0
    lora_dropout: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    target_modules: _Names = None
    exclude_modules: _Names = None
    target_parameters: _Names = None
    modules_to_save: _Names = None
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    layers_to_transform: list[int] | int | None = None
    layers_pattern: _Names = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None


_NO_MATTER = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "init_lora_weights",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying", "use_bdlora",
})  # fmt: skip
"""LoRA config fields for initialisation and storage. They do not affect forward passes with loaded weights."""


def put_on(model: Any, identity: Mapping[str, Any]) -> Any:
    """Add the recorded adapters, without their weights, and return the PEFT model. Only LoRA fields are used, so that a
    trace cannot trigger imports. Raises CannotReplay."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise CannotReplay("the model has PEFT adapters, but PEFT is not installed here: pip install peft") from error
    wrapped: Any = None
    for name, recorded in identity["adapters"].items():
        config = LoraConfig(**_fields(str(name), recorded, LoraConfig))
        try:
            with warnings.catch_warnings(action="ignore"):  # PEFT already gave these warnings during training
                if wrapped is None:
                    wrapped = get_peft_model(model, config, adapter_name=str(name), autocast_adapter_dtype=False)
                else:
                    wrapped.add_adapter(str(name), config, autocast_adapter_dtype=False)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CannotReplay(
                f"the adapter {ascii(name)[:80]} cannot be added to the model ({first_line(error)}); "
                f"install the peft version recorded in the trace (see tim-trace info)"
            ) from error
    wrapped.set_adapter(identity.get("active_adapter") or next(iter(identity["adapters"])))
    return wrapped


def _fields(name: str, recorded: Any, kind: Any) -> dict[str, Any]:
    try:
        known = msgspec.to_builtins(msgspec.convert(recorded, _Lora))
    except msgspec.ValidationError as error:
        raise CannotReplay(
            f"the adapter {ascii(name)[:80]} cannot be replayed ({error}); only LoRA and DoRA are supported"
        ) from error
    usual = kind().to_dict()
    others = [
        field for field, value in recorded.items()
        if field not in known and field not in _NO_MATTER and value not in (None, False, {}, [], usual.get(field))
    ]  # fmt: skip
    if others:
        raise CannotReplay(
            f"the adapter {ascii(name)[:80]} sets {', '.join(map(ascii, others[:3]))}, but only plain LoRA and DoRA "
            f"can be replayed"
        )
    del known["peft_type"]
    return {field: value for field, value in known.items() if value is not None}


def exported_config(name: str, recorded: Any) -> dict[str, Any]:
    from peft import LoraConfig

    if not re.fullmatch(r"[\w-]{1,80}", name):
        raise CannotReplay(f"the adapter name {ascii(name)[:80]} is not a valid folder name; the trace may be damaged")
    return _fields(name, recorded, LoraConfig) | {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}


def of_adapter(tensors: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        own = re.sub(rf"((?:^|\.)lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)
        own = own.replace(f".modules_to_save.{adapter}.", ".")
        if own != name:
            found[re.sub(r"(lora_magnitude_vector)\.weight$", r"\1", own)] = tensor
    return found


def without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def below(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in without_prefix(tensors).items()
        if ".modules_to_save." not in name and not re.search(r"(^|\.)lora_", name)
    }


def merged(wrapped: Any, load: Callable[[Any], None]) -> dict[str, Tensor]:
    """Return the weights under the base model's names, with the adapter merged into them. PEFT does the merging, as it
    does when TRL sends weights to an engine (trl.generation.vllm_generation)."""
    import torch

    model = wrapped.get_base_model()
    load(model)
    wrapped.merge_adapter()
    found = {}
    for name, tensor in model.state_dict().items():
        if ".original_module." in name or re.search(r"(^|\.)lora_", name):
            continue
        own = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name).replace(".base_layer.", ".")
        dtype = str(tensor.dtype).removeprefix("torch.")
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        found[own] = Tensor(dtype, flat.view(bits_type(dtype)).reshape(tuple(tensor.shape)))
    wrapped.unmerge_adapter()
    return found
