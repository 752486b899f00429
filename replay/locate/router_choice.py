"""Whether a router's choice of experts follows from the numbers that the router itself gave, by the router's own code.

How experts are chosen (the highest logits, or by groups, with a bias, of scores that are scaled) is nothing that could be told from
logits alone. So the router runs again, and from the moment on at which it has made its logits it goes on with the execution's.

Shapes: T tokens, E experts, S chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_STEPS = 4.0
"""Roundoffs of each number of an expert that may lie between the logits and the choice, and of the logits as they were given."""
_TIES = (0.0, 0.0), (1.0, -1.0), (1.0, 0.0), (0.0, -1.0)
"""How much each number of a chosen and of any other expert is moved, in those: a choice may fall either way within them."""


def _going_on(made: Any, given: Any, moved_TE: Any) -> Any:
    """A context in which the first result that equals `made` is `given`, and every number of an expert from there on is moved.

    Its `has_begun` says whether there was one.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class GoingOn(TorchFunctionMode):  # type: ignore[misc]
        has_begun = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.shape != made.shape:
                return result
            with torch._C.DisableTorchFunction():
                if not self.has_begun:
                    if not bool((result == made).all()):
                        return result
                    self.has_begun, result = True, given
                moved = result + moved_TE * result.abs()
                return torch.where(result.isfinite(), moved, result).to(result.dtype)

    return GoingOn()


def follows(
    again: Callable[[], Sequence[Any]], made_TE: Any, given_TE: Any, ids_TS: Any, ids_slot: int, unit: float
) -> Any:
    """[T] bool: whether choices are those that the code makes of these logits, in float64 or in their own dtype, or lie within rounding.

    `again` runs the router and gives its tensors, of which the one at `ids_slot` has the choices; `made_TE` are the logits that it
    makes itself, `given_TE` those that the execution gave with the choice `ids_TS`, `unit` the roundoff of its scores. None where
    the code makes no such logits before it chooses.
    """
    import torch

    sorted_TS = ids_TS.sort(-1).values
    is_chosen_TE = torch.zeros(given_TE.shape, dtype=torch.bool, device=given_TE.device).scatter(
        -1, ids_TS.long(), True
    )
    found = torch.zeros(len(ids_TS), dtype=torch.bool, device=ids_TS.device)
    for logits_TE in (given_TE.double(), given_TE):
        for chosen, other in _TIES:
            moved_TE = _STEPS * unit * torch.where(is_chosen_TE, chosen, other).to(logits_TE.dtype)
            going_on = _going_on(made_TE, logits_TE.reshape(made_TE.shape), moved_TE.reshape(made_TE.shape))
            with going_on:
                ids = again()[ids_slot]
            if not going_on.has_begun or ids.numel() != ids_TS.numel():
                return None
            found |= (ids.reshape(ids_TS.shape).sort(-1).values == sorted_TS).all(-1)
            if bool(found.all()):
                return found
    return found
