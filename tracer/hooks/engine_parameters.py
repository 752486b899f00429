"""Finds the tensors that a vLLM model holds for the weights sent to it.

A weight is stored either as a separate parameter or as rows in a fused parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def held_tensors(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each sent weight that is found among the model's parameters, and the tensor that the model
    holds for it.

    `shapes` maps the name of each sent weight to its shape. A fused parameter (qkv, gate and up) is split in the
    model's order, and vocabulary padding is cut off. Tensors that are sharded, packed for a kernel, or stacked as
    experts are left out.
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
            fits = tuple(parameter.shape) == shape or _is_padded(parameter, shape, own)
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
    """Return the vLLM model's own name for a tensor, using the model's mapping from transformers checkpoints."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    renamed = mapper.map_name(name) if hasattr(mapper, "map_name") else None
    # Some mappers return the fused parameter's name, but fused tensors must be looked up under their separate names.
    return name if renamed is None or getattr(mapper, "orig_to_new_stacked", None) else renamed


def _is_padded(parameter: Any, shape: tuple[int, ...], name: str) -> bool:
    is_vocabulary = "embed_tokens" in name or "lm_head" in name
    return is_vocabulary and parameter.shape[0] > shape[0] and tuple(parameter.shape[1:]) == shape[1:]
