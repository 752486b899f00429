"""Adapters of PEFT on a rebuilt model: LoRA and what belongs to it, as the trainer had them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ...schemas.errors import CannotReplay
from ...tracer.weights.chunks import bits_type
from ...tracer.weights.reader import Tensor

PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""

_Names = Annotated[list[str], msgspec.Meta(max_length=100_000)] | Annotated[str, msgspec.Meta(max_length=10_000)] | None


class _Lora(msgspec.Struct, forbid_unknown_fields=False):
    """The fields of peft.LoraConfig that decide a forward."""

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
"""Fields that decide how an adapter begins or where it is kept, and no forward with weights that are loaded."""


def put_on(model: Any, identity: Mapping[str, Any]) -> Any:
    """Put the adapters of a trace's model on the rebuilt one; their weights are still to be loaded. Returns peft's model.

    `identity` is what the trace says of the model: `adapters` (name -> its PEFT config) and `active_adapter`. Only LoRA's own
    fields are taken, so that nothing is imported because a trace names it. Raises CannotReplay.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise CannotReplay("the model has adapters of PEFT, which is not installed here: pip install peft") from error
    wrapped: Any = None
    for name, recorded in identity["adapters"].items():
        config = LoraConfig(**_fields(str(name), recorded, LoraConfig))
        try:
            with warnings.catch_warnings(action="ignore"):  # what PEFT told the trainer already
                if wrapped is None:
                    wrapped = get_peft_model(model, config, adapter_name=str(name), autocast_adapter_dtype=False)
                else:
                    wrapped.add_adapter(str(name), config, autocast_adapter_dtype=False)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            line = str(error).strip().partition("\n")[0]
            raise CannotReplay(
                f"the adapter {ascii(name)[:80]} cannot be put on the model ({line}); install the peft that the trace names (tim-trace info)"
            ) from error
    wrapped.set_adapter(identity.get("active_adapter") or next(iter(identity["adapters"])))
    return wrapped


def _fields(name: str, recorded: Any, kind: Any) -> dict[str, Any]:
    """What LoraConfig is given. Raises CannotReplay where the trace asks for more than is known here."""
    try:
        known = msgspec.to_builtins(msgspec.convert(recorded, _Lora))
    except msgspec.ValidationError as error:
        raise CannotReplay(
            f"the adapter {ascii(name)[:80]} is none that can be replayed ({error}); LoRA and DoRA can"
        ) from error
    usual = kind().to_dict()
    others = [
        field for field, value in recorded.items()
        if field not in known and field not in _NO_MATTER and value not in (None, False, {}, [], usual.get(field))
    ]  # fmt: skip
    if others:
        raise CannotReplay(
            f"the adapter {ascii(name)[:80]} sets {', '.join(map(ascii, others[:3]))}, which cannot be replayed; LoRA and DoRA without it can"
        )
    del known["peft_type"]
    return {field: value for field, value in known.items() if value is not None}


def exported_config(name: str, recorded: Any) -> dict[str, Any]:
    """An adapter's config as peft's folders have it, of the fields that are known here. Raises CannotReplay."""
    from peft import LoraConfig

    if not re.fullmatch(r"[\w-]{1,80}", name):
        raise CannotReplay(f"the adapter {ascii(name)[:80]} has a name that no folder can have; is the trace damaged?")
    return _fields(name, recorded, LoraConfig) | {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}


def of_adapter(tensors: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
    """The weights of one adapter, under the names that peft's folders have."""
    found = {}
    for name, tensor in tensors.items():
        own = re.sub(rf"((?:^|\.)lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)
        own = own.replace(f".modules_to_save.{adapter}.", ".")
        if own != name:
            found[re.sub(r"(lora_magnitude_vector)\.weight$", r"\1", own)] = tensor
    return found


def without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Recorded tensors under the names that they have in the wrapped model itself."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def below(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model below its adapters, under its own names: what scores where they are off."""
    found = {}
    for name, tensor in without_prefix(tensors).items():
        if ".modules_to_save." in name or re.search(r"(^|\.)lora_", name):
            continue
        found[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = tensor
    return found


class MergedWeights:
    """The weights of versions with their adapter merged in, as an engine without adapters is given them."""

    def __init__(self, wrapped: Any):
        """`wrapped` is peft's model of the trace, on the CPU, in the recorded dtypes."""
        self._wrapped = wrapped

    def __call__(self, load: Callable[[Any], None]) -> dict[str, Tensor]:
        """The tensors under the names of the model without adapters; `load` puts a version's weights into a model.

        They are merged by PEFT's own code, as trl.generation.vllm_generation has it done before an engine gets them.
        """
        model = self._wrapped.get_base_model()
        load(model)
        self._wrapped.merge_adapter()
        found = {}
        for name, tensor in model.state_dict().items():
            if ".original_module." in name or re.search(r"(^|\.)lora_", name):
                continue
            own = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name).replace(".base_layer.", ".")
            found[own] = _tensor(tensor)
        self._wrapped.unmerge_adapter()
        return found


def _tensor(tensor: Any) -> Tensor:
    """The bits of a tensor, copied."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return Tensor(dtype, flat.view(bits_type(dtype)).reshape(tuple(tensor.shape)))
