"""Bounds on an operator's rounding error, computed from its inputs.

u is a dtype's unit roundoff. Summing n products a b in any order has an error of at most g(n) u sum|a||b|. With
g(n) = n, the bound always holds (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). With
g(n) = 8 sqrt(n), it holds with probability 1 - 2 n exp(-32) or more (Higham and Mary, SIAM J. Sci. Comput. 41, 2019,
theorem 3.1). The smaller g(n) is used.

Shapes: T tokens, N heads, G key-value heads, D head width, V vocabulary, K inputs to a product, H hidden width,
I intermediate width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .taps import are_experts, is_adapted

_UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_SAFETY = 8.0
"""The parameter lambda in Higham and Mary's theorem."""
_FUSED = ("SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh", "ReLU", "Tanh", "Sigmoid")
"""Activations that run as a single operation and so round only once."""
_STEPS_OF_CODE = 4.0
"""Extra error allowed for code that may split sums differently, as a multiple of u times a token's largest element."""
_ROWS = 64


def unit(dtype: Any) -> float:
    return _UNITS.get(str(dtype).removeprefix("torch."), 2.0**-4)


def tiny(dtype: Any) -> float:
    return float(torch.finfo(dtype).smallest_normal * unit(dtype))


def growth(length: int) -> float:
    """Return g(n), the error bound for n summed products, relative to u sum|a||b|, where u is the unit roundoff."""
    return min(float(length), _SAFETY * math.sqrt(length)) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    given: Any
    taken: Any
    weight: Any = None
    """Weight dtype (torch), or None if the operator has no weight."""
    recorded: Any = None
    """Weight dtype in the recorded model (torch). The operator may use a copy in a narrower dtype."""
    adds: bool = False
    """True if the operator first adds two inputs and may use their unrounded sum."""

    @property
    def out(self) -> float:
        return unit(self.given)

    @property
    def sums(self) -> float:
        """Unit roundoff of sums. For dtypes narrower than float32, torch's and vLLM's matmuls accumulate in float32."""
        return min(max(self.out, 2.0**-53), 2.0**-24)

    @property
    def casts(self) -> float:
        """Relative error from rounding inputs and weights to a narrower dtype before multiplying."""
        found = 0.0
        if self.weight is not None and self.recorded is not None:
            found += max(unit(self.weight) - unit(self.recorded), 0.0)
        for wider in (self.taken, self.weight):
            if wider is not None and wider.is_floating_point and unit(wider) < self.out:
                found += self.out
        return found

    @property
    def least(self) -> float:
        """Absolute rounding error of values below the narrower dtype's normal range."""
        narrower = [self.given] if unit(self.taken) < self.out else []
        if self.weight is not None and self.recorded is not None and unit(self.weight) > unit(self.recorded):
            narrower.append(self.weight)
        return max(map(tiny, narrower), default=0.0)


def of_module(
    module: Any, takes: tuple[Any, ...], exact: Any, slot: int, rounding: Rounding, *, is_other_code: bool = False
) -> Any:
    """Bound the error in a module's output, given its float64 inputs and output. The bound broadcasts to `exact`. With
    `is_other_code`, every step inside the module may round."""
    bound = _of_module(module, takes, exact, slot, rounding, is_fused=not is_other_code)
    if is_other_code and exact.dim():
        bound = bound + _STEPS_OF_CODE * rounding.out * exact.abs().amax(-1, keepdim=True)
    return bound


def _of_module(
    module: Any, takes: tuple[Any, ...], exact: Any, slot: int, rounding: Rounding, *, is_fused: bool
) -> Any:
    floor = tiny(rounding.given)
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    if is_adapted(module):
        return _adapted(module, takes[0], exact, rounding) + floor
    if are_experts(module):
        return _experts(module, takes, exact, rounding) + floor
    if "Norm" in kind:
        # Normalised values may be subnormal before they are multiplied by the weight, so allow a larger absolute error.
        return _norm(module, takes[0], exact, rounding, is_fused=is_fused) + 4.0 * floor
    if "Rotary" in kind:
        # The cosines and sines may be multiplied by a factor above 1, before or after rounding. The highest frequency
        # is 1, so no angle exceeds the last position. The 2 is a safety margin.
        positions = [value for value in takes if value is not None and not value.is_floating_point()]
        angle = float(positions[0].max()) + 2.0 if positions else 2.0
        largest = max(1.0, float(exact.abs().amax()))
        return (2.0 * rounding.out) * largest - rounding.out + 4.0 * angle * 2.0**-24
    if "Embedding" in kind:
        scale = abs(float(getattr(module, "embed_scale", 1.0)))
        return (rounding.casts + 3.0 * rounding.out) * exact.abs() + rounding.least * scale + floor
    if weight is not None and weight.dim() == 2:
        return _product(module, takes[0], exact, slot, rounding) + floor
    if weight is None:
        is_fused = is_fused and kind in _FUSED
        size = takes[0].abs() if takes[0].shape == exact.shape else exact.abs().amax(-1, keepdim=True)
        return (
            (4.0 if is_fused else 12.0) * rounding.out * exact.abs()
            + floor
            + (8.0 * (rounding.sums if is_fused else rounding.out)) * size
        )
    return _whole(takes[0].shape[-1], exact, rounding) + floor


def of_rotary(exact: Any, last_position: int, rounding: Rounding) -> Any:
    """Bound the error [T, N, D] from rotating pairs of elements by float32 angles. Models pair elements differently,
    but a rotation preserves a pair's norm, which is at most sqrt(2) times the vector's largest element."""
    size = math.sqrt(2.0) * exact.abs().amax(-1, keepdim=True)
    return ((6.0 * rounding.out + 4.0 * (last_position + 2) * 2.0**-24) * size + tiny(rounding.given)).expand_as(exact)


def of_sum(exact: Any, rounding: Rounding, steps: float = 3.0) -> Any:
    """Bound the error in one elementwise sum or product, with up to `steps` roundings (scaling included)."""
    return steps * rounding.out * exact.abs() + tiny(rounding.given)


def of_branch(exact: Any, rounding: Rounding) -> Any:
    """Bound an unobserved MLP's or attention layer's error [T, H], relative to each token's largest element."""
    return 4.0 * _whole(4 * exact.shape[-1], exact, rounding)


def of_own_attention(exact: Any, rounding: Rounding) -> Any:
    """Bound the error in custom attention code, which may use float32 even in a float64 model."""
    length = max(exact.shape[0], exact.shape[-1])
    return (8.0 * growth(length) * max(rounding.sums, 2.0**-24) + 64.0 * rounding.out) * exact.abs().amax()


def of_attention(
    query: Any, key: Any, value: Any, weights: Any, exact: Any, scaling: float, rounding: Rounding, *,
    rounds_scores: bool, cut: float = 0.0, off: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """Bound an attention core's error [T, N, D], to first order in the score errors.

    All inputs are float64: query [T, N, D], key and value [T, G, D], and weights [N, T, T] (the exact softmax). `cut`
    is the error that slicing (`exact.slices.matmul`) adds to each weighted value, relative to the largest value. `off`
    contains bounds on the query and key errors. If `off` is empty, queries and keys are assumed to be exact.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1).transpose(0, 1) for states in (key, value))
    query = query.transpose(0, 1)
    lengths = key.norm(dim=-1)[:, None, :]
    query_off, key_off = (None, None)
    if off:
        query_off = off[0].norm(dim=-1).transpose(0, 1)[:, :, None]
        key_off = off[1].norm(dim=-1).transpose(0, 1).repeat_interleave(groups, dim=0)[:, None, :]
    per_score = growth(query.shape[-1]) * rounding.sums
    per_size = 3.0 * rounding.out if rounds_scores else 4.0 * rounding.sums
    parts = []
    for start in range(0, query.shape[1], _ROWS):
        rows = query[:, start : start + _ROWS]
        p = weights[:, start : start + _ROWS]
        apart = scaling * per_score * rows.norm(dim=-1, keepdim=True) * lengths
        apart = apart + per_size * scaling * (rows @ key.mT).abs()
        if query_off is not None:
            turned = query_off[:, start : start + _ROWS] * lengths + rows.norm(dim=-1, keepdim=True) * key_off
            apart = apart + scaling * turned
        apart = apart + (p * apart).sum(-1, keepdim=True)
        rest = (growth(key.shape[1]) * rounding.sums + 2.0 * rounding.out) * p
        part = (p * apart + rest) @ value.abs()
        if cut:
            part = part + 12.0 * key.shape[1] * cut * (p * value.abs().amax(-1)[:, None, :]).amax(-1, keepdim=True)
        parts.append(part)
    return torch.cat(parts, dim=1).transpose(0, 1) + 2.0 * rounding.out * exact.abs() + tiny(rounding.given)


def of_logprobs(
    hidden: Any, weight: Any, logits: Any, ids: Any, sums: float, out: float, temperature: float, casts: float = 0.0
) -> Any:
    """Bound the error [T] in a projection (if `weight` is given) and a log-softmax. `logits` [T, V] are exact and
    already divided by `temperature`."""
    total = logits.logsumexp(-1, keepdim=True)
    per_logit = logits.abs().mul_(4.0 * out)
    if weight is not None:
        lengths = ((growth(weight.shape[1]) * sums + casts) / temperature) * weight.norm(dim=-1)
        per_logit += hidden.norm(dim=-1, keepdim=True) * lengths
    taken = per_logit.gather(-1, ids[:, None])[:, 0] + (logits - total).exp_().mul_(per_logit).sum(-1)
    value = logits.gather(-1, ids[:, None])[:, 0] - total[:, 0]
    largest = logits.amax(-1).abs()
    return taken + (growth(logits.shape[-1]) + 4.0) * 2.0**-24 + 4.0 * 2.0**-24 * (largest + value.abs())


def _product(module: Any, x: Any, exact: Any, slot: int, rounding: Rounding) -> Any:
    """Bound the error in a linear layer or (if `slot` is above 0) in a router's scores, to first order."""
    weight = module.weight.double()
    if exact.shape[-1] == weight.shape[1] != weight.shape[0] or type(module).__name__ == "Conv1D":
        weight = weight.mT
    x = x.reshape(-1, x.shape[-1])
    per_term = growth(x.shape[-1]) * rounding.sums + rounding.casts
    off = (per_term * x.norm(dim=-1, keepdim=True)) * weight.norm(dim=-1)
    if rounding.least:
        off += rounding.least * x.abs().sum(-1, keepdim=True)
    if slot:
        return 2.0 * off.amax(-1, keepdim=True) * exact.abs() + 8.0 * rounding.out * exact.abs() + 8.0 * 2.0**-24
    return off.add_(exact.reshape(off.shape).abs(), alpha=2.0 * rounding.out).reshape(exact.shape)


def _adapted(module: Any, x: Any, exact: Any, rounding: Rounding) -> Any:
    """Bound the error in W x + s B A x (LoRA), with the weights separate or merged. DoRA also rescales rows."""
    weight = module.base_layer.weight.double()
    x = x.reshape(-1, x.shape[-1])
    lengths, taken = x.norm(dim=-1, keepdim=True), growth(x.shape[-1]) * rounding.sums + rounding.casts
    # If the adapter is merged, the weight is rounded once more, to its own dtype. Always allow for this rounding.
    merged = 0.0 if rounding.weight is None else 2.0 * unit(rounding.weight)
    whole, rows = weight, weight.norm(dim=-1)
    off = (taken + merged) * lengths * rows
    size = (x @ weight.mT).abs()
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        down, up = (part[name].weight.double() for part in (module.lora_A, module.lora_B))
        scale = abs(float(module.scaling[name]))
        inner = (x @ down.mT).abs()
        inner_off = taken * lengths * down.norm(dim=-1) + 2.0 * rounding.out * inner
        per_sum = growth(down.shape[0]) * rounding.sums + rounding.casts
        added = scale * (inner @ up.abs().mT)
        off = off + scale * (inner_off @ up.abs().mT) + (per_sum + 3.0 * rounding.out) * added
        off = off + merged * scale * lengths * (up.norm(dim=-1) * down.norm())
        size, whole = size + added, whole + float(module.scaling[name]) * (up @ down)
    off = off + 4.0 * rounding.out * size
    for name in module.active_adapters:
        if name in getattr(module, "lora_magnitude_vector", {}):
            magnitude = module.lora_magnitude_vector[name].weight.double()
            share = magnitude.abs() / whole.norm(dim=-1).clamp_min(1e-300)
            off = (
                off * (1.0 + share) + (growth(x.shape[-1]) * rounding.sums + 4.0 * rounding.out) * (1.0 + share) * size
            )
    return (off + 2.0 * rounding.out * exact.reshape(off.shape).abs()).reshape(exact.shape)


def _norm(module: Any, x: Any, exact: Any, rounding: Rounding, *, is_fused: bool) -> Any:
    per_sum = 0.5 * growth(x.shape[-1]) * rounding.sums + 6.0 * rounding.sums
    # If the weight has a wider dtype than the input, normalised values are first rounded to the input's dtype.
    out = max(rounding.out, unit(rounding.taken))
    # If the operator uses the unrounded sum of two inputs, each value and the norm may be off by one roundoff.
    of_sum = 2.0 * unit(rounding.taken) if rounding.adds else 0.0
    bias = getattr(module, "bias", None)
    # Implementations may round eight values: the mean, the centred value, its square, the mean square, the root, a
    # quotient, a factor and a sum. The root halves the errors of the square and the mean square, so these count as 7
    # roundings.
    rounds = 7.0 * out + of_sum
    if bias is None and "LayerNorm" not in type(module).__name__:
        length = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-150)
        weight = getattr(module, "weight", None)
        # If the factor is 1 + weight, the weight is rounded before 1 is added. The factor may be close to 0, so this
        # error is bounded relative to the weight.
        off = 0.0 if weight is None else rounding.casts * weight.double().abs() * (x.abs() / length)
        return (per_sum + (3.0 * out + of_sum if is_fused else rounds)) * exact.abs() + off
    spread = x.var(-1, keepdim=True, unbiased=False).sqrt().clamp_min(1e-12)
    normed = ((x - x.mean(-1, keepdim=True)) / spread).abs()
    added = x.new_zeros(()) if bias is None else bias.double()
    # Recover each channel's factor from the exact output, since it may be the weight or 1 + the weight.
    dims = tuple(range(x.dim() - 1))
    scale = (exact - added).abs().sum(dims) / normed.sum(dims).clamp_min(1e-150)
    size = scale * (x.abs() + x.abs().mean(-1, keepdim=True)) / spread
    of_mean = out * scale * x.mean(-1, keepdim=True).abs() / spread
    return 2.0 * (per_sum + of_sum) * size + of_mean + (rounds + rounding.casts) * (exact.abs() + added.abs())


def _experts(module: Any, takes: tuple[Any, ...], exact: Any, rounding: Rounding) -> Any:
    x, chosen, shares = takes[0], takes[1], takes[2]
    x = x.reshape(-1, x.shape[-1])
    up_EIK, down_EHI = module.gate_up_proj.double(), module.down_proj.double()
    if getattr(module, "is_transposed", up_EIK.shape[-1] != x.shape[-1]):
        up_EIK, down_EHI = up_EIK.mT, down_EHI.mT
    up_bias_EI, down_bias_EH = (getattr(module, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj"))
    first = growth(x.shape[-1]) * rounding.sums + rounding.casts
    second = growth(down_EHI.shape[-1]) * rounding.sums + rounding.casts
    bound = torch.zeros(len(x), down_EHI.shape[1], dtype=torch.float64, device=x.device)
    for expert in chosen.unique().tolist():
        if not 0 <= expert < len(up_EIK):
            continue
        token, place = torch.where(chosen == expert)
        rows = x[token]
        both = rows @ up_EIK[expert].mT
        if up_bias_EI is not None:
            both = both + up_bias_EI[expert].double()
        off = first * rows.norm(dim=-1, keepdim=True) * up_EIK[expert].norm(dim=-1) + 2.0 * rounding.out * both.abs()
        hidden, slopes = _gated(module, both)
        off = slopes * off
        halves = off.chunk(2, -1) if getattr(module, "is_concatenated", True) else (off[..., ::2], off[..., 1::2])
        off_hidden = 1.2 * torch.stack(halves).sum(0) + 4.0 * rounding.out * hidden
        weight = down_EHI[expert]
        total = off_hidden @ weight.abs().mT + second * hidden.norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
        size = hidden @ weight.abs().mT
        if down_bias_EH is not None:
            size = size + down_bias_EH[expert].double().abs()
        total = total + 4.0 * rounding.out * size
        bound.index_add_(0, token, total * shares[token, place, None].double().abs())
    return bound.reshape(exact.shape) + 2.0 * rounding.out * exact.abs()


def _gated(module: Any, both: Any) -> tuple[Any, Any]:
    """Return the absolute values [T, I] and the absolute slopes [T, 2 I] of an expert's gated product."""
    with torch.enable_grad():
        both = both.detach().clone().requires_grad_(True)
        if hasattr(module, "_apply_gate"):
            made = module._apply_gate(both)
        else:
            gate, up = both.chunk(2, -1)
            made = module.act_fn(gate) * up
        (slopes,) = torch.autograd.grad(made.sum(), both)
    return made.detach().abs(), slopes.abs()


def _whole(length: int, exact: Any, rounding: Rounding) -> Any:
    """Bound the error in an unknown operator, in proportion to each token's largest element."""
    return (growth(length) * rounding.sums + 16.0 * rounding.out) * exact.abs().amax(-1, keepdim=True)
