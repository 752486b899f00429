"""Whether a router's choice of experts follows from its own logits, by the router's own code.

Logits alone do not show how experts are chosen (by the highest logits, or by groups, with a bias, from scaled scores). So the router
runs again, and once it has made its logits, it goes on with the execution's.

Shapes: T tokens, E experts, S chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_STEPS = 4.0
"""Roundoffs that each number of an expert may have between the logits and the choice, and in the logits themselves."""
_TIES = (0.0, 0.0), (1.0, -1.0), (1.0, 0.0), (0.0, -1.0)
"""Shifts, in these roundoffs, of the numbers of a chosen and of any other expert: within them a choice may fall either way."""


def _going_on(made: Any, given: Any, moved_TE: Any) -> Any:
    """A context that replaces the first result equal to `made` by `given`, and shifts every number of an expert from there on.

    `has_begun` is whether there was such a result.
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
    """Return [T] bool: whether the code makes these choices from these logits, in float64 or their own dtype, or within rounding.

    `again` runs the router and returns its tensors; the one at `ids_slot` has the choices. `made_TE` are the logits that it makes
    itself, `given_TE` those of the execution with its choice `ids_TS`, `unit` the roundoff of its scores. None if the code makes no
    such logits before it chooses.
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
