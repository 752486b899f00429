"""Properties of a transformers model that determine its numerics, and its tokenizer's identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from ..routing import facts
from ..weights.layout import model_parameters, num_elements


def numerics(model: Any) -> dict[str, Any]:
    """Return a model's class, dtypes, FSDP casts, attention, experts, quantization and adapters."""
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
    """Return the dtypes that FSDP's mixed precision casts to in a forward pass.

    The keys are `parameters_dtype`, `buffers_dtype` and `outputs_dtype`.

    Casts that are not configured are left out; the result is empty for a model without FSDP. Autocast is separate, and
    not included.
    """
    if hasattr(type(model), "_get_fsdp_state"):
        policy = model._get_fsdp_state()._mp_policy
    else:
        policy = getattr(model, "mixed_precision", None) if "_fsdp_wrapped_module" in model._modules else None
    names = {"param_dtype": "parameters_dtype", "buffer_dtype": "buffers_dtype", "output_dtype": "outputs_dtype"}
    found = {name: getattr(policy, field, None) for field, name in names.items()}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items() if dtype is not None}


def class_path(model: Any) -> str:
    """Return the module and name of a model's class, ignoring FSDP1's wrapper and FSDP2's subclass."""
    kind = type(getattr(model, "_modules", {}).get("_fsdp_wrapped_module", model))
    if kind.__name__.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in kind.__bases__):
        kind = kind.__bases__[-1]
    return f"{kind.__module__}.{kind.__qualname__}"


def dtypes(model: Any) -> dict[str, int]:
    """Return dtype -> number of the model's parameters with that dtype."""
    counts: Counter[str] = Counter()
    for parameter in model_parameters(model):
        counts[str(parameter.dtype).removeprefix("torch.")] += num_elements(parameter)
    return dict(sorted(counts.items()))


def described(model: Any, name: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's identity: the given name and config, its class, and the number and dtypes of its parameters."""
    counts = dtypes(model)
    return {
        "name": name,
        "class": class_path(model),
        "num_parameters": sum(counts.values()),
        "dtypes": counts,
        "config": config,
    }


def tokenizer_identity(processing_class: Any) -> dict[str, Any]:
    """Return the identity of the run's tokenizer, with a hash over its whole definition."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "name": getattr(tokenizer, "name_or_path", None),
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "vocab_size": len(tokenizer),
        "sha256": None if backend is None else sha256(backend.to_str().encode()).hexdigest(),
    }
