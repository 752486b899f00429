"""The run's tokenizer: who it is."""

from __future__ import annotations

from hashlib import sha256
from typing import Any


def tokenizer_identity(processing_class: Any) -> dict[str, Any]:
    """Which tokenizer the run uses; the hash is of its whole definition."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "name": getattr(tokenizer, "name_or_path", None),
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "vocab_size": len(tokenizer),
        "sha256": None if backend is None else sha256(backend.to_str().encode()).hexdigest(),
    }
