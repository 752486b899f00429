"""The recorded model, rebuilt from its config and a version's weights."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...schemas.errors import CannotReplay
from ...tracer.weights.reader import Tensor
from . import packing


def build(
    identity: Mapping[str, Any],
    *,
    dtype: str,
    attention: str,
    device: str,
    experts: str | None = None,
    factory: str | None = None,
) -> Any:
    """Build the model with weights still to be loaded.

    `identity` is what the trace says of the model (`class`, `config`); `dtype` is torch's name; `experts` is the
    implementation of a mixture's experts, as transformers names it. `factory` is
    `module:function` of what builds it instead, called with `config` (a dict), `dtype` (torch's) and `attention`.
    Raises CannotReplay.
    """
    import torch

    if factory is not None:
        build_model = _function(factory)
        model = build_model(config=dict(identity["config"]), dtype=getattr(torch, dtype), attention=attention)
        return model.to(device=device, dtype=getattr(torch, dtype))
    module, _, name = str(identity.get("class", "")).rpartition(".")
    try:
        chosen = {} if experts is None else {"experts_implementation": experts}
        chosen |= {"dtype": getattr(torch, dtype), "attn_implementation": attention}
        model = _of_transformers(module, name, dict(identity["config"]), chosen)
    except (ImportError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise CannotReplay(
            f"the model cannot be rebuilt: {module}.{name} with attention {attention!r}: {error}; install the versions "
            "that the trace names (tim-trace info), choose another --attention, or build it with --model-factory"
        ) from error
    return model.to(device)


def _of_transformers(module: str, name: str, config: dict[str, Any], chosen: dict[str, Any]) -> Any:
    from transformers.initialization import no_init_weights

    packing.register()
    model_class = getattr(importlib.import_module(module), name)
    with no_init_weights():
        model = model_class._from_config(model_class.config_class.from_dict(config), **chosen)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # every weight is loaded; what is left to set are buffers
    model.init_weights()
    return model


def _function(path: str) -> Any:
    """`module:function`, looked for in the working directory too."""
    module, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotReplay(
            f"model factory {path!r}: cannot be imported ({error}); write module:function, with the module in the "
            "working directory or installed"
        ) from error
    finally:
        sys.path.remove(os.getcwd())


def load(model: Any, tensors: Mapping[str, Tensor], dtype: str | None) -> None:
    """Put a version's weights into the model, bit for bit, or rounded to `dtype`. Raises CannotReplay."""
    import torch

    wanted = model.state_dict(keep_vars=True)  # the tensors themselves: another dtype can be put in their place
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
