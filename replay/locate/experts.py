"""Compare mixtures of experts with float64: the router's choice, the expert weights, and the sum of the outputs.

A router may choose by groups, add a bias, or scale its scores, so the router itself is run again on the execution's
logits.

Shapes: T tokens, E experts, S experts selected per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import bounds
from .heard import Heard
from .judged import GIVES, ratio
from .names import kind_of, layer_of
from .taps import Call, tokens_first

EXPERTS, ROUTER = "experts", "router"
_MOST_FLIPPED = 0.25
"""If the router was not observed, expert choices count as wrong if they differ for more than this share of tokens."""
_STEPS = 4.0
"""Rounding error allowed in a router logit, and in each value computed from it before the choice (unit roundoffs)."""
_TIES = (0.0, 0.0), (1.0, -1.0), (1.0, 0.0), (0.0, -1.0)
"""Pairs of shifts, one for the chosen experts' logits and one for all others, in multiples of the allowed rounding
error. A choice is accepted if the router makes it after any of these shifts."""


def judge_router(
    heard: Heard, name: str, module: Any, takes: tuple[Any, ...], outputs: list[Any], call: Call,
    again: Callable[[], list[Any]],
) -> None:  # fmt: skip
    """Judge a router's logits, its choice of experts given these logits, and its scores."""
    kind, layer = kind_of(name), layer_of(name)
    # Some routers return choices before logits, so take the widest output as the logits.
    widths = [value.shape[-1] * value.is_floating_point() for value in outputs]
    num_chosen = max(value.shape[-1] for value in outputs if not value.is_floating_point())
    of_all = widths.index(max(widths)) if max(widths) > num_chosen else 0
    logits = chosen = None
    for slot, (value, given) in enumerate(zip(outputs, call.gives, strict=False)):
        if given is None:
            continue
        if given.numel() != value.numel():
            if value.is_floating_point():
                continue
            differs = torch.ones(len(given), dtype=torch.bool)  # the number of chosen experts differs
            heard.judgement.add_differing(name, kind, layer, differs, given.numel())
            return
        exact = value.reshape(given.shape)
        if not value.is_floating_point():
            chosen = given, exact, slot
        elif slot == of_all:
            bound = heard.bound(name, module, 0, value, takes, call, given)
            # A logit error affects the forward pass only through the scores, so it is not propagated separately (no
            # `point` is passed).
            heard.judgement.add(name, kind, layer, given, exact, bound)
            logits = exact, bound, given
    if chosen is None:
        return
    ids_TS, exact_TS, ids_slot = chosen
    differs_T = (ids_TS.sort(-1).values != exact_TS.sort(-1).values).any(-1)
    if bool(differs_T.any()) and logits is not None and exact_TS.dim() == 2 and int(ids_TS.max()) < logits[0].shape[-1]:
        exact_TE, bound_TE, given_TE = logits
        unit = max(bounds.unit(each.dtype) for each in call.gives if each is not None and each.is_floating_point())
        made_right = follows(again, outputs[of_all], given_TE, ids_TS, ids_slot, max(unit, 2.0**-24))
        if made_right is None:
            # Each logit may be off by the bound, so two logits may swap places if they differ by up to twice the bound.
            least = exact_TE.gather(-1, exact_TS).amin(-1) - exact_TE.gather(-1, ids_TS).amin(-1)
            made_right = least <= 2.0 * bound_TE.amax(-1)
        differs_T &= ~made_right
    heard.judgement.add_differing(name, kind, layer, differs_T, ids_TS.numel())
    same_T = (ids_TS == exact_TS).all(-1)
    for slot, (value, score) in enumerate(zip(outputs, call.gives, strict=False)):
        is_score = slot != of_all and score is not None and value.is_floating_point()
        if not is_score or score.numel() != value.numel() or not bool(same_T.any()):
            continue
        # Scores may have a wider dtype than the logits from which they are computed. The narrower dtype sets the bound.
        made_of = [each for each in (call.gives[of_all], score) if each is not None and each.is_floating_point()]
        coarser = max(made_of, key=lambda each: bounds.unit(each.dtype))
        bound = heard.bound(name, module, slot or 1, value, takes, call, score, made_in=coarser.dtype)
        value = value.reshape(score.shape)
        point = heard.called(name), GIVES, slot
        heard.judgement.add(name, kind, layer, score[same_T], value[same_T], bound[same_T], point)
        # Tokens with different choices have no comparable scores, so their error is set to 0.
        if point in heard.judgement.errors:
            off = torch.where(same_T[:, None], score.double() - value, 0.0)
            heard.judgement.errors[point] = off.type(torch.float32)


def judge_choice(heard: Heard, name: str, found: Sequence[Any], takes: Sequence[Any]) -> None:
    """Judge the expert weights [T, S] if the router was not observed. Tokens with different experts are skipped, but
    too many of them (more than rounding can explain) count as an error."""
    if len(takes) != len(found):
        return
    ids, scores, taken_ids, taken = found[1], found[2], takes[1], takes[2]
    is_choice = not ids.is_floating_point() and scores.is_floating_point() and ids.shape == scores.shape
    if not is_choice or any(each is None or each.shape != ids.shape for each in (taken_ids, taken)):
        return
    (sorted_ids, order), (taken_sorted, taken_order) = (each.sort(-1) for each in (ids, taken_ids))
    exact, given = scores.gather(-1, order), taken.gather(-1, taken_order)
    same_T = (sorted_ids == taken_sorted).all(-1)
    if bool((given.double() == exact).all()) and bool(same_T.all()):
        return
    layer = layer_of(name)
    where = f"layers.{layer}.{ROUTER}"
    if float((~same_T).double().mean()) > _MOST_FLIPPED:
        heard.judgement.add_differing(where, ROUTER, layer, ~same_T, given.numel())
        return
    bound = bounds.of_sum(exact.abs(), heard.rounding(given.dtype), 8.0)
    for (of, operator), (_, unheard) in heard.unheard.items():
        if of == layer and operator in ("gate", "router"):  # a logit's error becomes a relative error of the weight
            logits = unheard(given.dtype).reshape(len(exact), -1).amax(-1, keepdim=True)
            bound = bound + 2.0 * logits * exact.abs()
    heard.judgement.add(where, ROUTER, layer, given[same_T], exact[same_T], bound[same_T])


def is_wrong_sum(heard: Heard, name: str, output: Any, found: Any) -> bool:
    """Record an error and return True if rounding cannot explain how far a mixture is from its experts' sum."""
    layer, exact = layer_of(name), tokens_first(output, found)
    bound = heard.stream_bound(exact, heard.rounding(found.dtype))
    if (missed := heard.missed(layer, EXPERTS, exact, found.dtype)) is not None:
        bound = bound + missed[1]
    if ratio(found, exact, bound) <= 1.0:
        return False
    heard.judgement.add(f"{name}.{EXPERTS}", EXPERTS, layer, found, exact, bound)
    return True


class _GoingOn(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, made: Any, given: Any, moved_TE: Any):
        super().__init__()
        self._made, self._given, self._moved_TE = made, given, moved_TE
        self.has_begun = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.shape != self._made.shape:
            return result
        with torch._C.DisableTorchFunction():
            if not self.has_begun:
                if not bool((result == self._made).all()):
                    return result
                self.has_begun, result = True, self._given
            moved = result + self._moved_TE * result.abs()
            return torch.where(result.isfinite(), moved, result).to(result.dtype)


def follows(
    again: Callable[[], Sequence[Any]], made_TE: Any, given_TE: Any, ids_TS: Any, ids_slot: int, unit: float
) -> Any:
    """Return a [T] mask: True where the router would choose `ids_TS` from the logits `given_TE`, up to rounding.

    `again` runs the router and returns its tensors, including the choices at `ids_slot`. `made_TE` are the logits that
    the router itself computes. Return None if the router chooses without computing logits first.
    """
    sorted_TS = ids_TS.sort(-1).values
    is_chosen_TE = torch.zeros(given_TE.shape, dtype=torch.bool, device=given_TE.device).scatter(
        -1, ids_TS.long(), True
    )
    found = torch.zeros(len(ids_TS), dtype=torch.bool, device=ids_TS.device)
    for logits_TE in (given_TE.double(), given_TE):
        for chosen, other in _TIES:
            moved_TE = _STEPS * unit * torch.where(is_chosen_TE, chosen, other).to(logits_TE.dtype)
            going_on = _GoingOn(made_TE, logits_TE.reshape(made_TE.shape), moved_TE.reshape(made_TE.shape))
            with going_on:
                ids = again()[ids_slot]
            if not going_on.has_begun or ids.numel() != ids_TS.numel():
                return None
            found |= (ids.reshape(ids_TS.shape).sort(-1).values == sorted_TS).all(-1)
            if bool(found.all()):
                return found
    return found
