"""What of a model of transformers decides its numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..routing import facts


def numerics(model: Any) -> dict[str, Any]:
    """Its class, dtypes, attention, experts, quantization and adapters."""
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "dtypes": dtypes(model),
        "attention": getattr(model.config, "_attn_implementation", None),
        "experts": getattr(model.config, "_experts_implementation", None),
        "quantization": str(getattr(model.config, "quantization_config", None) or "") or None,
        "adapters": sorted(getattr(model, "peft_config", None) or {}),
        **facts(model),
    }


def dtypes(model: Any) -> dict[str, int]:
    """Dtype -> parameters that have it."""
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(sorted(counts.items()))
