"""Compare an attention layer's core (queries, keys, values and output) against a float64 reference.

Shapes: T tokens, N heads, G key-value heads, D head width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from . import bounds
from .heard import Heard
from .judged import GIVES, TAKES, ratio
from .names import ATTENTION, kind_of, layer_of
from .taps import like

ROTARY = "rotary"
STATES = "queries", "keys", "values"
"""Kinds of input to an attention core. If a rotary embedding precedes the core, wrong queries and keys are reported as
ROTARY instead, unless only the keys are wrong (a cache may have changed them)."""
_QKV = "q_proj", "k_proj", "v_proj"
_NORMS = tuple(re.compile(rf"\.{word[0]}(?:{word[1:]})?_?(?:layer)?norm$") for word in ("query", "key", "value"))
_OTHERWISE = 0.1
"""Minimum relative difference in queries or keys that is attributed to a wrong norm or to reordered dimensions."""


class Cores:
    def __init__(self, heard: Heard, operators: Collection[str]):
        self._heard, self._operators = heard, operators
        self.has_rotary = any(name.rpartition(".")[2] == "rotary_emb" for name in operators)
        self._normed: tuple[set[int | None], ...] = (set(), set(), set())

    def note_norm(self, name: str) -> None:
        for layers, norm in zip(self._normed, _NORMS, strict=True):
            if norm.search(name):
                layers.add(layer_of(name))

    def judge(
        self, name: str, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Judge a core's inputs [1, N, T, D], then its output on the execution's inputs. Return the execution's output."""
        heard, layer = self._heard, layer_of(name)
        call = heard.begin(name)
        heard.judgement.attended.add(layer)
        if call is None:
            given = original(module, *args, **kwargs)

            def bound(dtype: Any) -> Any:
                return heard.attention_bound(args[:3], given, kwargs, heard.rounding(dtype), turns=True)

            heard.miss(name, given[0], bound)
            return given
        states = self._judged_states(name, args[:3], call.takes)
        given = original(module, *states, *args[3:], **kwargs)
        found = call.gives[0]
        heard.end(name)
        if found is None:
            return given
        exact = given[0].reshape(found.shape)
        rounding = heard.rounding(found.dtype, call.takes[0].dtype)
        limit = heard.attention_bound(tuple(states), given, kwargs, rounding, turns=False).reshape(exact.shape)
        heard.judgement.add(name, ATTENTION, layer, found, exact, limit, (heard.called(name), GIVES, 0))
        return (like(found, given[0]), *given[1:])

    def _judged_states(self, name: str, states: tuple[Any, ...], takes: Sequence[Any]) -> list[Any]:
        heard, layer = self._heard, layer_of(name)
        new, takes = list(states), list(takes)
        order_D = _order_of_dimensions(states[:2], takes[:2])
        if order_D is not None:
            takes[:2] = (taken[..., order_D] for taken in takes[:2])
        are_right = True
        for slot, (state, taken) in enumerate(zip(states, takes, strict=True)):
            if taken is None:
                continue
            exact, rounding = state[0].transpose(0, 1), heard.rounding(taken.dtype)
            turns = slot < 2 and self.has_rotary
            last = heard.first_position + len(exact)
            bound = bounds.of_rotary(exact, last, rounding) if turns else bounds.of_sum(exact, rounding)
            _, fused = heard.unheard.get((layer, _QKV[slot]), (None, None))
            if fused is not None and layer not in self._normed[slot]:
                # The projection before the rotation was not observed, so allow for its error. A rotation can move an error
                # to the other element of a pair.
                bound = bound + math.sqrt(2.0) * fused(taken.dtype).reshape(exact.shape).amax(-1, keepdim=True)
            kind = STATES[slot]
            if turns:
                # Queries and keys use the same cosines and sines, so if only the keys are wrong, report the keys,
                # unless each head's norm is right.
                is_right = ratio(taken, exact, bound) <= 1.0
                # A wrong rotation still preserves each head's norm.
                keeps = (taken.double().norm(dim=-1) - exact.norm(dim=-1)).abs() <= bound.norm(dim=-1)
                kind = ROTARY if slot == 0 or is_right or not are_right or bool(keeps.all()) else kind
                are_right = is_right
            where, kind = self._wrong_state(name, slot, kind, taken.double(), exact)
            heard.judgement.add(where, kind, layer, taken, exact, bound, (name, TAKES, slot))
            new[slot] = like(taken, state, heads_first=True)
        return new

    def _wrong_state(self, core: str, slot: int, kind: str, found: Any, exact: Any) -> tuple[str, str]:
        """Return the operator that would explain wrong queries, keys or values [T, N, D], and its kind. Rotations
        preserve lengths, so wrong lengths point to the preceding norm if its output was not observed."""
        norms = [
            (name, kind_of(name))
            for name in self._operators
            if name.startswith(core.removesuffix(ATTENTION)) and _NORMS[slot].search(name)
        ]
        if norms and layer_of(core) not in self._normed[slot]:
            lengths, others = (each.norm(dim=-1) for each in (exact, found))
            if float((others - lengths).abs().max()) > _OTHERWISE * float(lengths.amax()):
                return norms[0]
        return f"layers.{layer_of(core)}.{kind}" + (f".{'qk'[slot]}" if kind == ROTARY else ""), kind


def _order_of_dimensions(states: Sequence[Any], takes: Sequence[Any]) -> Any:
    """Return the permutation from the float64 model's query and key dimensions [D] to the execution's, or None if the
    order is the same or no permutation fits. Scores do not depend on this order, as long as it is the same for queries
    and keys."""
    if any(taken is None for taken in takes):
        return None
    exact, found = [], []
    for state, taken in zip(states, takes, strict=True):
        exact.append(state[0].transpose(0, 1).flatten(0, 1))
        found.append(taken.double().flatten(0, -2))
        if exact[-1].shape != found[-1].shape or not _relative(found[-1], exact[-1]) > _OTHERWISE:
            return None
    order_D = torch.cdist(torch.cat(exact).mT, torch.cat(found).mT).argmin(1)
    if len(order_D.unique()) < len(order_D):
        return None
    pairs = zip(exact, found, strict=True)
    return order_D if all(_relative(b[:, order_D], a) <= _OTHERWISE for a, b in pairs) else None


def _relative(found: Any, exact: Any) -> float:
    return float((found - exact).norm() / exact.norm())
