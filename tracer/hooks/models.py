"""Read a trained model's numerics and tensors."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from ..routing import facts
from ..weights.identity import class_path, dtypes
from ..weights.layout import flat_parameter, is_sharded, model_parameters, model_tensors, num_elements

_unwrapped: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def trained_model(trainer: Any) -> Any:
    """Return the unwrapped model, but keep FSDP1's wrapper because it holds the parameters."""
    known = _unwrapped.get(trainer.model)
    model = None if known is None else known()
    if model is None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        if model is not trainer.model and hasattr(trainer.model, "modules"):
            wrappers = (m for m in trainer.model.modules() if m._modules.get("_fsdp_wrapped_module") is model)
            model = next(wrappers, model)
        _unwrapped[trainer.model] = weakref.ref(model)
    return model


def is_whole(model: Any) -> bool:
    return not any(
        is_sharded(parameter) or getattr(parameter, "ds_id", None) is not None for parameter in model_parameters(model)
    )


def transfer_name(name: str, adapter_prefix: str | None) -> str | None:
    """Return the name TRL uses to send a parameter to vLLM, or None if it is not sent."""
    if adapter_prefix is not None:
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if adapter_prefix in name or "original_module" in name:
            return None
        name = name.replace("modules_to_save.default.", "")
    return name.replace("_checkpoint_wrapped_module.", "")


def is_quantised(parameter: Any) -> bool:
    return not parameter.is_floating_point() or type(parameter).__module__.startswith("bitsandbytes.")


def trainer_tensors(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each tensor's name, its value with any adapter merged in, and its base value (None without an adapter).

    Quantised tensors are skipped.
    """
    prefix = getattr(model, "prefix", None) if hasattr(model, "peft_config") else None
    merged = _adapted(model) if prefix is not None else {}
    for name, parameter in model.named_parameters():
        given = transfer_name(name, prefix)
        if given is None or is_quantised(parameter):
            continue
        layer, _, inner = name.rpartition(".base_layer.")
        if layer in merged:
            yield given, _merged(merged[layer], inner), parameter.data
        else:
            yield given, parameter.data, None


def _adapted(model: Any) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and hasattr(module, "merge") and not module.merged
    }


def _merged(layer: Any, inner: str) -> Any:
    import torch

    with torch.no_grad():
        twin = copy.deepcopy(layer)
        twin.merge()
        return twin.get_base_layer().get_parameter(inner).data


def held_tensors(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
    """Yield the engine's weights under the names used to send them.

    `shapes` maps names to shapes. Fused parameters are split, and vocabulary padding is removed. Sharded tensors,
    stacked experts and tensors packed for a kernel are skipped.
    """
    parameters = dict(model.named_parameters())
    parts_of: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    fused_with = {part: (fused, parts) for fused, parts in parts_of.items() for part in parts}
    for name, shape in shapes.items():
        own = _engine_name(model, name)
        module, _, kind = own.rpartition(".")
        leaf = module.rpartition(".")[2]
        if own in parameters:
            parameter, first = parameters[own].data, 0
            held, is_vocabulary = tuple(parameter.shape), "embed_tokens" in own or "lm_head" in own
            fits = held == shape or (is_vocabulary and held[:1] > shape[:1] and held[1:] == shape[1:])
        elif leaf in fused_with:
            fused, parts = fused_with[leaf]
            parameter = getattr(parameters.get(f"{module.removesuffix(leaf)}{fused}.{kind}"), "data", None)
            given = name.rpartition(".")[0].removesuffix(leaf)
            rows = [shapes.get(f"{given}{part}.{kind}", (0,))[:1] or (0,) for part in parts]
            first = sum(length for (length,) in rows[: parts.index(leaf)])
            fits = parameter is not None and (sum(length for (length,) in rows), *shape[1:]) == tuple(parameter.shape)
        else:
            continue
        if fits and parameter is not None:
            yield name, parameter[first : first + shape[0]] if shape else parameter


def _engine_name(model: Any, name: str) -> str:
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    renamed = mapper.map_name(name) if hasattr(mapper, "map_name") else None
    # A mapper that stacks tensors returns the fused tensor's name, but the lookup needs the original name.
    return name if renamed is None or getattr(mapper, "orig_to_new_stacked", None) else renamed


_REMEDY = "to replay, record with --weights delta, or pass the run's checkpoints with --weights-from DIR"


class KeptWeights:
    def __init__(self, session: Any):
        self._session = session
        self._is_kept: bool | None = None
        self._version: int | None = None

    def keep(self, version: int, model: Any, *, is_first: bool) -> None:
        if self._version == version:
            return
        self._version = version
        if self._is_kept is None:
            self._is_kept = keeps_weights(self._session, model)
        if self._is_kept:
            self._session.recorder.add_weights(version, own_tensors(model, is_first=is_first))


def keeps_weights(session: Any, model: Any) -> bool:
    order = session.order
    if order.weights == "none":
        return False
    problem = _problem(model)
    if problem:
        session.note(f"weights are not recorded: {problem}")
        return False
    num_bytes = sum(num_elements(parameter) * parameter.element_size() for parameter in model_parameters(model))
    if order.weights == "auto" and num_bytes > order.weights_below:
        session.note(
            f"weights are not recorded: {num_bytes / 1e9:.2f} GB exceeds --weights-below "
            f"{order.weights_below / 1e9:g}GB; {_REMEDY}"
        )
        return False
    return True


def own_tensors(model: Any, *, is_first: bool) -> dict[str, Any]:
    tensors = model_tensors(model).items()
    return {name: t for name, t in tensors if is_first or (is_sharded(t) and not getattr(t, "is_replicated", False))}


def _problem(model: Any) -> str | None:
    if any(getattr(parameter, "ds_id", None) is not None for parameter in model.parameters()):
        return f"tim-trace cannot read DeepSpeed ZeRO-3 shards; {_REMEDY}"
    flats = [flat for module in model.modules() if (flat := flat_parameter(module)) is not None]
    if any(any(flat._param_extensions) or not all(flat._contiguities) for flat in flats):
        return f"tim-trace cannot read FSDP1 parameters that are also sharded in another way (use FSDP2); {_REMEDY}"
    return None


def numerics(model: Any) -> dict[str, Any]:
    return {
        "class": class_path(model),
        "dtypes": dtypes(model),
        **fsdp_casts(model),
        "attention": getattr(model.config, "_attn_implementation", None),
        "experts": getattr(model.config, "_experts_implementation", None),
        "quantization": str(getattr(model.config, "quantization_config", None) or "") or None,
        "adapters": sorted(getattr(model, "peft_config", None) or {}),
        **facts(model),
    }


def fsdp_casts(model: Any) -> dict[str, str]:
    if hasattr(type(model), "_get_fsdp_state"):
        policy = model._get_fsdp_state()._mp_policy
    else:
        policy = getattr(model, "mixed_precision", None) if "_fsdp_wrapped_module" in model._modules else None
    names = {"param_dtype": "parameters_dtype", "buffer_dtype": "buffers_dtype", "output_dtype": "outputs_dtype"}
    found = {name: getattr(policy, field, None) for field, name in names.items()}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items() if dtype is not None}
