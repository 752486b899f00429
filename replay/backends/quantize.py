"""Weight-only fake quantisation: weights are rounded to the values of a quantised engine, in their own dtype.

Shapes: E experts, O outputs and I inputs of a linear layer, G inputs per group.
"""

from __future__ import annotations

from typing import Any

import torch

GROUP = 128
"""G: number of inputs that share a scale. The last group in a row may be shorter."""
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""Largest representable magnitude of each format; fp8 is e4m3."""


def quantize(model: Any, kind: str) -> None:
    """Round the weights of all experts and of all linear layers except the head."""
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
    """Return a weight rounded to the format `kind`. Each group has one symmetric scale, from its largest magnitude.

    int8 has 255 values and int4 has 15.
    """
    parts = []
    for part_OG in weight_OI.float().split(GROUP, dim=1):
        scale_O1 = part_OG.abs().amax(dim=1, keepdim=True) / _LARGEST[kind]
        scale_O1 = torch.where(scale_O1 == 0, torch.ones_like(scale_O1), scale_O1)
        grid_OG = part_OG / scale_O1
        grid_OG = grid_OG.to(torch.float8_e4m3fn).float() if kind == "fp8" else grid_OG.round()
        parts.append(grid_OG * scale_O1)
    return torch.cat(parts, dim=1).to(weight_OI.dtype)
