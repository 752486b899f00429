"""Observes queries and keys of custom attention code: the factors of its first product that looks like scores.

Shapes: B rows in a forward pass, W padded row length, N heads, D head width, T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

States = tuple[Any, Any]
"""Queries and keys, [B, N, W, D] each; keys may be repeated to the number of query heads, and queries scaled."""


def hearing(shape: tuple[int, int]) -> Any:
    """Return a context for one call of an attention layer, which observes its queries and keys.

    The context's `states` are the queries and keys in a forward pass of shape [B, W], or None if none were found;
    `pass_over` stops the observation.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    matrices = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__)
    added = (torch.baddbmm, torch.Tensor.baddbmm)

    class Hearing(TorchFunctionMode):  # type: ignore[misc]
        states: States | None = None
        is_over = False

        def pass_over(self) -> None:
            self.is_over = True

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if not self.is_over:
                with torch._C.DisableTorchFunction():
                    self.states = self._states(func, args, kwargs)
                self.is_over = self.states is not None
            return func(*args, **kwargs)

        @staticmethod
        def _states(func: Any, args: Any, kwargs: Mapping[str, Any]) -> States | None:
            if func is torch.nn.functional.scaled_dot_product_attention:
                both = args[:2] if len(args) > 1 else (kwargs.get("query"), kwargs.get("key"))
                return (
                    _of_forward(both[0], both[1], shape)
                    if all(each is not None and each.dim() == 4 for each in both)
                    else None
                )
            if func in matrices and len(args) == 2 and args[1].dim() > 1:
                return _of_forward(args[0], args[1].mT, shape)
            if func in added and len(args) == 3:
                return _of_forward(args[1], args[2].mT, shape)
            if func is torch.einsum and len(args) == 3:
                return _of_einsum(args[0], args[1], args[2], shape)
            return None

    return Hearing()


def _of_forward(query: Any, key: Any, shape: tuple[int, int]) -> States | None:
    """Return the two factors of a product of attention scores if their axes are rows, heads, tokens and head width;
    else None."""
    B, W = shape
    is_product = query.dim() == key.dim() > 2 and query.shape[-1] == key.shape[-1]
    if not is_product or not query.shape[-2] == key.shape[-2] == W:
        return None
    if query[..., 0, 0].numel() % B or key[..., 0, 0].numel() % B:
        return None
    query, key = (each.detach().reshape(B, -1, W, each.shape[-1]) for each in (query, key))
    return query, key


def _of_einsum(equation: Any, first: Any, second: Any, shape: tuple[int, int]) -> States | None:
    """Return the queries and keys multiplied by an einsum that sums over one letter, with rows first and two letters
    for tokens."""
    if not isinstance(equation, str) or "." in equation:
        return None
    terms, _, result = equation.replace(" ", "").partition("->")
    ours, _, theirs = terms.partition(",")
    width = [letter for letter in ours if letter in theirs and letter not in result]
    tokens = [
        [letter for letter, size in zip(term, value.shape, strict=True) if letter not in other and size == shape[1]]
        for term, value, other in ((ours, first, theirs), (theirs, second, ours))
    ]
    if len(width) != 1 or any(len(each) != 1 for each in tokens):
        return None
    states = []
    for term, value, (token,) in zip((ours, theirs), (first, second), tokens, strict=True):
        heads = [letter for letter in term if letter not in (token, *width)]
        states.append(value.permute([term.index(letter) for letter in (*heads, token, *width)]))
    if states[0].dim() < 3 or states[1].dim() < 3:
        return None
    query, key = (each.reshape(each.shape[0], -1, *each.shape[-2:]) for each in states)
    return _of_forward(query, key, shape)
