"""Describe a model and a tokenizer, so that a replay can load the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from .layout import model_parameters, num_elements


def class_path(model: Any) -> str:
    kind = type(getattr(model, "_modules", {}).get("_fsdp_wrapped_module", model))
    if kind.__name__.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in kind.__bases__):
        kind = kind.__bases__[-1]
    return f"{kind.__module__}.{kind.__qualname__}"


def dtypes(model: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for parameter in model_parameters(model):
        counts[str(parameter.dtype).removeprefix("torch.")] += num_elements(parameter)
    return dict(sorted(counts.items()))


def described(model: Any, name: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    counts = dtypes(model)
    return {
        "name": name,
        "class": class_path(model),
        "num_parameters": sum(counts.values()),
        "dtypes": counts,
        "config": config,
    }


def tokenizer_identity(processing_class: Any) -> dict[str, Any]:
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "name": getattr(tokenizer, "name_or_path", None),
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "vocab_size": len(tokenizer),
        "sha256": None if backend is None else sha256(backend.to_str().encode()).hexdigest(),
    }
