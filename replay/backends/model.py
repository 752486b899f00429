"""The recorded model, rebuilt from its config and a version's weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...schemas.errors import CannotReplay
from ...tracer.weights.reader import Tensor


def build(identity: Mapping[str, Any], *, dtype: str, attention: str, device: str) -> Any:
    """Build the model with weights still to be loaded.

    `identity` is what the trace says of the model (`class`, `config`); `dtype` is torch's name. Raises CannotReplay.
    """
    import torch

    module, _, name = str(identity.get("class", "")).rpartition(".")
    try:
        model_class = getattr(importlib.import_module(module), name)
        config = model_class.config_class.from_dict(dict(identity["config"]))
        model = model_class._from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    except (ImportError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise CannotReplay(
            f"the model cannot be rebuilt: {module}.{name} with attention {attention!r}: {error}; install the versions "
            "that the trace names (tim-trace info), or choose another --attention"
        ) from error
    return model.to(device)


def load(model: Any, tensors: Mapping[str, Tensor], dtype: str | None) -> None:
    """Put a version's weights into the model, bit for bit, or rounded to `dtype`. Raises CannotReplay."""
    import torch

    wanted = model.state_dict()
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        raise CannotReplay(
            f"the weights do not fit the model: {len(missing)} tensors are missing ({', '.join(missing[:3])}), "
            f"{len(extra)} have no place ({', '.join(extra[:3])}); adapters cannot be replayed yet"
        )
    with torch.no_grad():
        for name, target in wanted.items():
            source = to_torch(tensors[name])
            if source.shape != target.shape:
                raise CannotReplay(
                    f"the weights do not fit the model: {name} is {tuple(source.shape)}, not {tuple(target.shape)}"
                )
            if dtype is None and source.dtype != target.dtype:
                # The run kept this tensor in a dtype of its own.
                target.data = source.to(target.device)
            else:
                target.copy_(source)


def to_torch(tensor: Tensor) -> Any:
    """A tensor over the same bits."""
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(tensor.bits).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, tensor.dtype)).reshape(tensor.bits.shape)
