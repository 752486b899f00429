"""Mixture-of-experts routing: the experts selected for each token and their weights.

Shapes: N tokens, L layers with a router, S slots (experts selected per token), C cells in one forward
pass (B * W), B rows, W width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..schemas.errors import InvalidRecord
from ..schemas.layout import DENSE
from .store import Store, damaged

EXPERT_IDS, EXPERT_WEIGHTS = "expert_ids", "expert_weights"
NOT_ROUTED = -1
"""Value of `expert_ids` at tokens that a pass did not route."""

_ROUTER = re.compile(r"Router|Gate$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    expert_ids: Any
    """[N, L, S] selected expert ids in slot order, or -1 if not routed."""
    expert_weights: Any = None
    """[N, L, S] factors applied to expert outputs, or None if not recorded."""

    @property
    def arrays(self) -> dict[str, Any]:
        named = {EXPERT_IDS: self.expert_ids, EXPERT_WEIGHTS: self.expert_weights}
        return {name: values for name, values in named.items() if values is not None}


@dataclass(frozen=True, slots=True)
class Router:
    layer: int
    module: Any

    @property
    def num_experts(self) -> int | None:
        weight = getattr(self.module, "weight", None)
        found = getattr(self.module, "num_experts", None) or (None if weight is None else weight.shape[0])
        return None if found is None else int(found)

    @property
    def num_slots(self) -> int | None:
        found = getattr(self.module, "top_k", None)
        return found if isinstance(found, int) else None


def is_mixture(model: Any) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def routers(model: Any) -> list[Router]:
    """Return a model's routers, sorted by layer.

    A router is a sibling of a module named `experts`, and its class name contains `Router` or ends with `Gate`.
    """
    found: list[Router] = []
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        if "experts" not in children:
            continue
        layer = _LAYER.search(f"{name}.")
        for child in children.values():
            if child is not children["experts"] and _ROUTER.search(type(child).__name__):
                found.append(Router(int(layer[1]) if layer else len(found), child))
    return sorted(found, key=lambda router: router.layer)


def facts(model: Any) -> dict[str, Any]:
    known = routers(model)
    if not known:
        return {}
    layers = [router.layer for router in known]
    return {"moe_layers": layers, "num_experts": known[0].num_experts, "experts_per_token": known[0].num_slots}


def choice(output: Any) -> tuple[Any, Any, int] | None:
    """Return the expert ids [C, S] and weights [C, S] in a router's output, and the index of the ids in `output`.

    Returns None if the output has an unknown form. transformers' routers return (logits, weights, ids) or (ids,
    weights, logits).
    """
    if not isinstance(output, tuple) or len(output) < 3:
        return None
    weights = output[1]
    for place in (2, 0):
        ids = output[place]
        if not all(hasattr(value, "dtype") and value.ndim == 2 for value in (ids, weights)):
            continue
        if not ids.dtype.is_floating_point and weights.dtype.is_floating_point and ids.shape == weights.shape:
            return ids, weights, place
    return None


class RouterTap:
    def __init__(self, known: Sequence[Router]):
        self._routers = known
        self._heard: list[list[tuple[Any, Any]]] = [[] for _ in known]
        self._handles: list[Any] = []
        self.problem: str | None = None
        """Reason why router choices cannot be read, or None if they can be."""

    def __enter__(self) -> RouterTap:
        self._handles = [
            router.module.register_forward_hook(partial(self._keep, index))
            for index, router in enumerate(self._routers)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, index: int, module: Any, _inputs: Any, output: Any) -> None:
        found = choice(output)
        if found is None:
            self.problem = f"{type(module).__name__} does not return its choices as (logits, weights, ids)"
            return
        ids_CS, weights_CS, _ = found
        try:
            narrow = ids_CS.to(id_dtype(self._routers[index].num_experts))
            self._heard[index].append((narrow, weights_CS.detach().clone()))
        except RuntimeError as error:  # usually out of memory, which must not stop the model's forward pass
            self.problem = f"the router choices cannot be copied ({str(error).splitlines()[0]})"
            self._heard = [[] for _ in self._routers]

    def forwards(self) -> list[Routing]:
        """Return the router choices made since the previous call, as one Routing [C, L, S] per forward pass."""
        import torch

        heard, self._heard = self._heard, [[] for _ in self._routers]
        shapes = {ids.shape[1:] for layer in heard for ids, _ in layer}
        if self.problem is None and (len({len(layer) for layer in heard}) > 1 or len(shapes) > 1):
            self.problem = "the routers do not select the same number of experts in every layer and forward pass"
        if self.problem is not None:
            return []
        return [
            Routing(
                expert_ids=torch.stack([ids for ids, _ in layers], dim=1),
                expert_weights=torch.stack([weights for _, weights in layers], dim=1),
            )
            for layers in zip(*heard, strict=True)
        ]


def id_dtype(num_experts: int | None) -> Any:
    import torch

    if num_experts is None:
        return torch.int32
    return torch.int8 if num_experts <= 1 << 7 else torch.int16 if num_experts <= 1 << 15 else torch.int32


def of_cells(heard: Sequence[Routing], mask_BW: np.ndarray) -> Routing | None:
    import torch

    if sum(len(part.expert_ids) for part in heard) != mask_BW.size:
        return None
    chosen = torch.from_numpy(np.ascontiguousarray(mask_BW)).reshape(-1)
    whole = joined(heard)
    return whole and Routing(**{name: values[chosen.to(values.device)] for name, values in whole.arrays.items()})


def joined(parts: Sequence[Routing]) -> Routing | None:
    import torch

    if not parts:
        return None
    ids, weights = (torch.cat([getattr(part, name) for part in parts]) for name in (EXPERT_IDS, EXPERT_WEIGHTS))
    return Routing(expert_ids=ids, expert_weights=weights)


def check_routing(routing: Routing, num_tokens: int, what: str) -> None:
    ids, weights = np.asarray(routing.expert_ids), routing.expert_weights
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or len(ids) != num_tokens:
        raise InvalidRecord(
            f"{what}: expert_ids have shape {ids.shape} and dtype {ids.dtype}. Pass integers [N, layers, slots] with N = "
            f"{num_tokens}. Each row's prompt tokens come before its response tokens"
        )
    if weights is not None and tuple(weights.shape) != ids.shape:
        raise InvalidRecord(
            f"{what}: expert_weights have shape {tuple(weights.shape)}, but expert_ids have shape {ids.shape}"
        )


def read_routing(store: Store, places: Sequence[tuple[str, int, int]]) -> list[Routing]:
    """Read the routing of score rows. Each row is given as (`routing`, `routing_start`, number of tokens)."""
    from .dense import read_dense

    spans: dict[str, tuple[int, int]] = {}
    for group, start, count in places:
        first, last = spans.get(group, (start, start + count))
        spans[group] = min(first, start), max(last, start + count)
    spanned = {group: read_dense(store, group, first, last - first) for group, (first, last) in spans.items()}
    found = []
    for group, start, count in places:
        if EXPERT_IDS not in spanned[group]:
            raise damaged(f"{store.shown(f'{DENSE}/{group}')} has no routing for rows {start} to {start + count}")
        begin = start - spans[group][0]
        part = {name: values[begin : begin + count] for name, values in spanned[group].items()}
        found.append(Routing(expert_ids=part[EXPERT_IDS], expert_weights=part.get(EXPERT_WEIGHTS)))
    return found
