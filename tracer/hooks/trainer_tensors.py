"""A TRL trainer's tensors as its engine should receive them: under the transfer's names, adapters merged."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from ..weights.layout import is_sharded, model_parameters

_unwrapped: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def trained_model(trainer: Any) -> Any:
    """Return the trained model, cached, without accelerate's wrappers; FSDP1's stays, as it has the parameters."""
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
    """Return True if no tensor of a model is sharded: this process holds each one in full."""
    return not any(
        is_sharded(parameter) or getattr(parameter, "ds_id", None) is not None for parameter in model_parameters(model)
    )


def transfer_name(name: str, adapter_prefix: str | None) -> str | None:
    """Return the name under which TRL sends a parameter to vLLM; None if it is not sent."""
    if adapter_prefix is not None:
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if adapter_prefix in name or "original_module" in name:
            return None
        name = name.replace("modules_to_save.default.", "")
    return name.replace("_checkpoint_wrapped_module.", "")


def is_quantised(parameter: Any) -> bool:
    """Return True if a parameter holds packed values, which an engine receives unpacked."""
    return not parameter.is_floating_point() or type(parameter).__module__.startswith("bitsandbytes.")


def trainer_tensors(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each tensor's name, the tensor, and the tensor without its adapter (None if no adapter changes it).

    Quantised tensors are skipped.

    The adapter is merged by PEFT's own code, in a temporary copy of the layer.
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
    """Return name -> layer, for all layers whose adapter is not currently merged."""
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
