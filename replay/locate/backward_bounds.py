"""Bounds of the rounding error of the gradients an operator passes on, given its incoming gradients.

A vector-Jacobian product has the same kind of sums as a forward: for a linear layer Y = X W^T, dX = dY W (a sum over
outputs) and dW = dY^T X (a sum over tokens). Each sum has the bound of module `bounds`; the sizes of rows and columns
are bounded by their norms (Cauchy and Schwarz). Errors of intermediate results are followed to first order.

Shapes: B rows, W padded row length, M = B W tokens, K inputs, O outputs, N heads, G key-value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bounds import growth, unit

_STEPS = 24.0
"""Assumed number of roundings per element in an elementwise backward pass."""


@dataclass(frozen=True, slots=True)
class BackwardRounding:
    """Unit roundoffs of the dtypes used in a backward pass."""

    out: float
    """Unit roundoff of the coarsest dtype among inputs, outputs and gradients."""
    sums: float
    """Unit roundoff of the dtype in which sums are accumulated."""

    @classmethod
    def of(cls, *values: Any) -> BackwardRounding:
        """Return the roundoffs for the tensors that take part in a backward pass; None among them is skipped."""
        out = max(unit(value.dtype) for value in values if value is not None and value.is_floating_point())
        return cls(out, min(max(out, 2.0**-53), 2.0**-24))


def of_input(module: Any, x: Any, incoming: Any, exact: Any, rounding: BackwardRounding) -> Any:
    """Bound dX, in the shape of `exact` or broadcastable to it; x and incoming are the execution's, in float64."""
    weight = getattr(module, "weight", None)
    kind = type(module).__name__
    if "Norm" in kind:
        return _norm_input(module, x, incoming, rounding)
    if weight is not None and weight.dim() == 2 and "Embedding" not in kind:
        weight = _outputs_first(module)
        per_term = growth(weight.shape[0]) * rounding.sums + 3.0 * rounding.out
        return per_term * incoming.norm(dim=-1, keepdim=True) * weight.norm(dim=0) + 2.0 * rounding.out * exact.abs()
    if incoming.shape == exact.shape:
        # Derivatives of activations are at most 1.2, computed from terms of the size of 1 + |x|.
        return _STEPS * rounding.out * (1.0 + x.abs()) * incoming.abs()
    return of_between(exact, 0.0, rounding)


def of_parameter(module: Any, name: str, x: Any, incoming: Any, exact: Any, rounding: BackwardRounding) -> Any:
    """Bound the gradient of a module's own parameter `name`, broadcastable to its shape."""
    kind = type(module).__name__
    rows, columns = incoming.reshape(-1, incoming.shape[-1]), x.reshape(-1, x.shape[-1])
    number = growth(len(rows))
    weight = getattr(module, "weight", None)
    if "Embedding" in kind:
        return number * rounding.out * rows.norm(dim=0) * len(rows) ** 0.5
    if name == "bias":
        return (number * rounding.out + 3.0 * rounding.out) * rows.abs().sum(0)
    if "Norm" in kind:
        normalised = _normalised(module, columns).reshape(-1, incoming.shape[-1])
        return (number * rounding.sums + _STEPS * rounding.out) * (rows.abs() * normalised).sum(0)
    if weight is not None and weight.dim() == 2 and name == "weight" and len(rows) == len(columns):
        bound = (number * rounding.sums + 3.0 * rounding.out) * rows.norm(dim=0)[:, None] * columns.norm(dim=0)
        return bound.mT if kind == "Conv1D" else bound
    size = 0.0 if exact is None else float(exact.abs().max())
    return (2.0 * number * rounding.sums + 4.0 * _STEPS * rounding.out) * size


def of_between(exact: Any, contributions: Any, rounding: BackwardRounding, *, angles: int = 0) -> Any:
    """Bound sums, rotations and products between operators, relative to a token's largest element.

    `contributions` bounds the sizes of the added terms; `angles` is the last position of a rotary.
    """
    size = exact.abs().amax(-1, keepdim=True) + contributions
    return (_STEPS * rounding.out + 4.0 * angles * 2.0**-24) * size


def of_attention(
    states: tuple[Any, Any, Any], weights: Any, incoming: Any, scaling: float, rounding: BackwardRounding
) -> tuple[Any, Any, Any]:
    """Bound dQ, dK and dV.

    states are queries [B, N, W, D], keys and values [B, G, W, D], weights P [B, N, W, W], incoming dO [B, N, W, D].
    With dP = dO V^T and dS = P (dP - rowsum(P dP)): dV = P^T dO, dQ = scaling dS K, dK = scaling dS^T Q.
    """
    query, key, value = states
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    length, width = query.shape[2], query.shape[3]
    per_score = scaling * query.norm(dim=-1, keepdim=True) * key.norm(dim=-1)[:, :, None, :]
    off = (growth(width) * rounding.sums + 4.0 * rounding.out) * per_score
    off = off + (weights * off).sum(-1, keepdim=True) + 4.0 * rounding.out + growth(length) * rounding.sums
    reach = incoming.norm(dim=-1, keepdim=True) * value.norm(dim=-1)[:, :, None, :]
    mean = (weights * reach).sum(-1, keepdim=True)
    size = weights * (reach + mean)
    per_reach = growth(width) * rounding.sums + 8.0 * rounding.out + growth(length) * rounding.sums
    error = size * (off + per_reach) + weights * (weights * reach * off).sum(-1, keepdim=True)
    rest = (growth(length) * rounding.sums + 4.0 * rounding.out) * size
    query_bound = scaling * (error + rest) @ key.abs()
    key_bound = scaling * (error + rest).mT @ query.abs()
    per_value = weights * (off + growth(length) * rounding.sums + 4.0 * rounding.out)
    value_bound = per_value.mT @ incoming.abs()
    return query_bound, _summed(key_bound, groups), _summed(value_bound, groups)


def _summed(value: Any, groups: int) -> Any:
    B, N, W, D = value.shape
    return value.view(B, N // groups, groups, W, D).sum(2)


def _outputs_first(module: Any) -> Any:
    weight = module.weight.detach()
    return weight.mT if type(module).__name__ == "Conv1D" else weight


def _normalised(module: Any, x: Any) -> Any:
    """Return the sizes of normalised inputs, including the mean that centring subtracts."""
    if _centres(module):
        spread = (x.var(-1, keepdim=True, unbiased=False) + _eps(module)).sqrt()
        return (x.abs() + x.mean(-1, keepdim=True).abs()) / spread
    return x.abs() / (x.square().mean(-1, keepdim=True) + _eps(module)).sqrt()


def _norm_input(module: Any, x: Any, incoming: Any, rounding: BackwardRounding) -> Any:
    weight = getattr(module, "weight", None)
    scale = 1.0 if weight is None else weight.detach().abs() + 1.0
    flows = scale * incoming.abs()
    normalised = _normalised(module, x)
    if _centres(module):
        spread = (x.var(-1, keepdim=True, unbiased=False) + _eps(module)).sqrt()
    else:
        spread = (x.square().mean(-1, keepdim=True) + _eps(module)).sqrt()
    size = flows + normalised * (flows * normalised).mean(-1, keepdim=True) + flows.mean(-1, keepdim=True)
    return (growth(x.shape[-1]) * rounding.sums + _STEPS * rounding.out) * size / spread


def _centres(module: Any) -> bool:
    return "LayerNorm" in type(module).__name__


def _eps(module: Any) -> float:
    return float(getattr(module, "eps", getattr(module, "variance_epsilon", 1e-12)))
