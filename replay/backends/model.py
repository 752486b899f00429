"""Rebuild the recorded model from its config and weights."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from ...schemas.errors import CannotReplay, option
from ...tracer.store import first_line
from ...tracer.weights.reader import Tensor
from . import adapters, packing, trusted

Weights = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
_ROOM = 0.8
"""Fraction of the free GPU memory that weights may take. The rest is for activations."""
MAX_MODULES = 200_000
GROUP = 128
"""Number of inputs that share a scale in a quantised weight. A row's last group may be shorter."""
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""Largest magnitude in each format. fp8 is e4m3."""


def build(
    identity: Mapping[str, Any], *, dtype: str, attention: str, device: str, experts: str | None = None,
    factory: str | None = None, allow_kernel: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Build the model with its adapters but without weights. Raises CannotReplay.

    `factory` names a function (`module:function`) to call instead of transformers. The function gets `config` (a dict),
    `dtype` (a torch dtype) and `attention`. Without a factory, the model class must be one of transformers' own, and no
    third-party code runs except the attention kernels in `allow_kernel`.
    """
    trusted.check_dtype(dtype)
    trusted.check_attention(attention, experts, allowed=allow_kernel, is_own_model=factory is not None)
    if factory is not None:
        build_model = _function(factory)
        model = build_model(config=dict(identity["config"]), dtype=getattr(torch, dtype), attention=attention)
        # Convert only parameters. Buffers keep their dtype, because rotary frequencies are always float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        return _placed(model, device)
    path = str(identity.get("class", ""))
    model_class, config = trusted.model_class(path), trusted.safe_config(identity["config"])
    try:
        chosen = {} if experts is None else {"experts_implementation": experts}
        chosen |= {"dtype": getattr(torch, dtype), "attn_implementation": attention}
        model = _of_transformers(model_class, config, chosen, device)
        _set_dtypes(model, dtype)
        if identity.get("adapters"):
            model = adapters.put_on(model, identity).get_base_model()
    except CannotReplay:
        raise
    except Exception as error:  # transformers can raise any exception for a bad config
        raise CannotReplay(
            f"the model cannot be rebuilt: {path} with attention {attention!r}: {first_line(error)}; install the versions "
            f"recorded in the trace (see tim-trace info), choose another attention, or build the model with "
            f"{option('model_factory', 'MODULE:FUNCTION')}"
        ) from error
    return _placed(model, device)


def _placed(model: Any, device: str) -> Any:
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    if num_gpus > 1 and num_bytes > _ROOM * torch.cuda.mem_get_info(0)[0]:
        return divided(model, {index: int(_ROOM * torch.cuda.mem_get_info(index)[0]) for index in range(num_gpus)})
    for parameter in model.parameters() if device == "cuda" else ():
        # Do not copy parameters from the host: the recorded weights are loaded later, directly onto the device.
        parameter.data = torch.empty_like(parameter, device=device)
    return model.to(device)


def divided(model: Any, memory: Mapping[int | str, int]) -> Any:
    """Split the model by layer across devices, given each device's memory in bytes. Raises CannotReplay."""
    from accelerate import dispatch_model, infer_auto_device_map

    whole = getattr(model, "_no_split_modules", None)
    device_map = infer_auto_device_map(model, max_memory=dict(memory), no_split_module_classes=list(whole or ()))
    if "disk" in device_map.values():
        raise CannotReplay(
            f"the model does not fit: its layers need more than the {sum(memory.values()):,} bytes available on "
            f"{len(memory)} devices; replay with more GPUs, or on a cluster with {option('gpus_per_arm', 'N')}"
        )
    return dispatch_model(model, device_map, force_hooks=True)


def given_weights(identity: Mapping[str, Any], adapter: str | None, dtype: str) -> Weights:
    """Return a function from recorded tensors to the model's. `adapter`: `merged`, `off`, or None (kept separate)."""
    if not identity.get("adapters"):
        return lambda tensors: tensors
    if adapter is None:
        return adapters.without_prefix
    if adapter == "off":
        return adapters.below
    below = build(without_adapters(identity), dtype=dtype, attention="eager", device="cpu")
    wrapped = adapters.put_on(below, identity)
    return lambda tensors: adapters.merged(wrapped, lambda model: load(model, adapters.without_prefix(tensors), None))


def without_adapters(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name != "adapters"}


def _of_transformers(model_class: Any, config: dict[str, Any], chosen: dict[str, Any], device: str) -> Any:
    from transformers import AttentionInterface

    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    packing.register()
    # Build on the meta device first, to check the size before memory is allocated.
    with torch.device("meta"), no_init_weights(), _within_memory(device):
        model_class._from_config(model_class.config_class.from_dict(deepcopy(config)), **chosen)
    with no_init_weights():
        model = model_class._from_config(model_class.config_class.from_dict(config), **chosen)
    if chosen["attn_implementation"] not in ("eager", *AttentionInterface()):  # e.g. a kernel failed to load
        raise KeyError(f"attention kernel {chosen['attn_implementation']} could not be fetched or loaded")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # the weights are loaded later, so initialise only the buffers
    model.init_weights()
    return model


@contextmanager
def _within_memory(device: str) -> Iterator[None]:
    from torch.nn.modules import module as modules

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cuda":
        memory = sum(torch.cuda.mem_get_info(index)[1] for index in range(torch.cuda.device_count()))
    parts = num_bytes = 0

    def count(_owner: Any, _name: str, part: Any) -> None:
        nonlocal parts, num_bytes
        parts += 1
        if hasattr(part, "element_size"):
            num_bytes += part.numel() * part.element_size()
        if parts > MAX_MODULES or num_bytes > memory:
            raise CannotReplay(
                f"the model cannot be rebuilt: its config needs at least {parts:,} modules and tensors ({num_bytes:,} "
                f"bytes), but this machine has {memory:,} bytes; replay on a larger machine, or check whether the trace "
                "is damaged"
            )

    with ExitStack() as stack:
        for part in ("parameter", "buffer", "module"):
            stack.callback(getattr(modules, f"register_module_{part}_registration_hook")(count).remove)
        yield


def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotReplay(
            f"model factory {path!r} cannot be imported ({error}); write module:function (the module must be "
            "installed or in the working directory)"
        ) from error
    finally:
        sys.path.remove(os.getcwd())


def _set_dtypes(model: Any, dtype: str) -> None:
    """Restore float32 for tensors that transformers keeps in float32 in 16-bit models, such as a router's bias. In a
    float64 model, convert the remaining float32 parameters to float64."""
    strict = "_keep_in_fp32_modules_strict"
    lists = {"bfloat16": (strict,), "float16": (strict, "_keep_in_fp32_modules")}
    kept = {part for name in lists.get(dtype, ()) for part in getattr(model, name, None) or ()}
    is_kept = re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, sorted(kept)))})(?:\.|$)")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if kept and is_kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    if dtype == "float64":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.double()


def load(model: Any, tensors: Mapping[str, Tensor], dtype: str | None) -> None:
    wanted = model.state_dict(keep_vars=True)  # keep_vars returns the tensors themselves, so their dtype can be changed
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        raise CannotReplay(
            f"the weights do not match the model: {len(missing)} tensors are missing ({', '.join(missing[:3])}) and "
            f"{len(extra)} are unexpected ({', '.join(extra[:3])}); check that the weights belong to this "
            "model. If the model has adapters, record the trace with this tim-trace release or a later one"
        )
    with torch.no_grad():
        for name, target in wanted.items():
            source = to_torch(tensors[name])
            if source.shape != target.shape:
                raise CannotReplay(
                    f"the weights do not match the model: {name} has shape {tuple(source.shape)}, but the model expects "
                    f"{tuple(target.shape)}; check that the weights belong to this model"
                )
            if dtype is None and source.dtype != target.dtype:
                # The recorded tensor has a different dtype from the rebuilt one, so use the recorded dtype.
                target.data = source.to(target.device, copy=True)
            else:
                target.copy_(source)


def to_torch(tensor: Tensor) -> Any:
    bits = tensor.bits
    flat = torch.from_numpy(np.require(bits, requirements=["C", "A"]).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, tensor.dtype)).reshape(bits.shape)


def quantize(model: Any, kind: str) -> None:
    """Round expert and linear-layer weights (not the head) to the values a quantised engine would use. Shapes: E
    experts, O outputs, I inputs, G inputs per group."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(rounded(module.weight, kind))
            elif hasattr(module, "is_transposed"):  # transformers' experts: one tensor per layer
                for weight in module.parameters(recurse=False):
                    if weight.ndim == 3:
                        weight_EOI = weight.transpose(1, 2) if module.is_transposed else weight
                        weight_EOI.copy_(rounded(weight_EOI.flatten(0, 1), kind).view(weight_EOI.shape))


def rounded(weight_OI: Any, kind: str) -> Any:
    parts = []
    for part_OG in weight_OI.float().split(GROUP, dim=1):
        scale_O1 = part_OG.abs().amax(dim=1, keepdim=True) / _LARGEST[kind]
        scale_O1 = torch.where(scale_O1 == 0, torch.ones_like(scale_O1), scale_O1)
        grid_OG = part_OG / scale_O1
        grid_OG = grid_OG.to(torch.float8_e4m3fn).float() if kind == "fp8" else grid_OG.round()
        parts.append(grid_OG * scale_O1)
    return torch.cat(parts, dim=1).to(weight_OI.dtype)
