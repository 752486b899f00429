"""Where a vLLM model holds the tensors that it is given: under their names, or as rows of a fused parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def held_tensors(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
    """Each given name that the model's parameters can be mapped to, and what the model holds of it.

    `shapes` are those of all tensors that are given. A fused parameter (qkv, gate and up) is cut where its parts, in the
    model's own order, fill it; a vocabulary that is padded, behind its last row. Tensors that are split over processes,
    packed for a kernel, or stacked as experts are left out.
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
    """The model's own name of a tensor, by the mapping that it declares for checkpoints of transformers."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    renamed = mapper.map_name(name) if hasattr(mapper, "map_name") else None
    # A mapper that fuses names the fused parameter: the parts are looked up by themselves.
    return name if renamed is None or getattr(mapper, "orig_to_new_stacked", None) else renamed


def _is_padded(parameter: Any, shape: tuple[int, ...], name: str) -> bool:
    is_vocabulary = "embed_tokens" in name or "lm_head" in name
    return is_vocabulary and parameter.shape[0] > shape[0] and tuple(parameter.shape[1:]) == shape[1:]
