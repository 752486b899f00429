"""Shapes: B rows in a forward pass, W padded row length, C tokens per router call, L routers, S experts selected per
token, N tokens in all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ...schemas.errors import CannotReplay
from ...tracer.routing import NOT_ROUTED, Router, RouterTap, Routing, choice
from ..batching import ForwardBatch


@contextmanager
def followed(
    known: Sequence[Router], batch: ForwardBatch, recorded: Sequence[Routing] | None, into: list[Routing], *,
    keeps_same_sets: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Append each row's router choices to `into`. Force the choices in `recorded`, if given, except for padding tokens
    and (with `keeps_same_sets`) where the router selects the same experts in any order. Raises CannotReplay if they do
    not fit."""
    if not known:
        yield
        return
    tap = RouterTap(known)
    with ExitStack() as stack:
        if recorded is not None:
            table = Table(known, batch, recorded, keeps_same_sets)
            for index, router in enumerate(known):
                stack.callback(router.module.register_forward_hook(partial(table.replace, index)).remove)
        stack.enter_context(tap)  # registered last, to read the choices that the experts receive
        yield
    parts = tap.forwards()
    if parts:
        into.extend(_rows(parts, batch))
    elif recorded is not None:
        raise CannotReplay(f"the recorded routing cannot be used: {tap.problem or 'the routers did not run'}")


class Table:
    def __init__(
        self, known: Sequence[Router], batch: ForwardBatch, recorded: Sequence[Routing], keeps_same_sets: bool
    ):
        self._keeps_same_sets = keeps_same_sets
        if any(part.expert_weights is None for part in recorded):
            raise CannotReplay("the recorded routing has expert ids but no expert weights; record both")
        ids_NLS = np.concatenate([np.asarray(part.expert_ids) for part in recorded])
        weights_NLS = np.concatenate([np.asarray(part.expert_weights) for part in recorded])
        num_layers, num_slots = ids_NLS.shape[1:]
        wanted = (len(known), known[0].num_slots or num_slots)
        if (num_layers, num_slots) != wanted:
            raise CannotReplay(
                f"the recorded routing covers {num_layers} layers with {num_slots} experts per token, but the model "
                f"has {wanted[0]} with {wanted[1]}; check that this is the model that was trained"
            )
        cells = batch.tokens_BW
        self.ids_BWLS = np.full((*cells.shape, num_layers, num_slots), NOT_ROUTED, np.int64)
        self.weights_BWLS = np.zeros(self.ids_BWLS.shape, weights_NLS.dtype)
        self.ids_BWLS[cells], self.weights_BWLS[cells] = ids_NLS, weights_NLS
        self._done = [0] * num_layers

    def replace(self, index: int, module: Any, _inputs: Any, output: Any) -> tuple[Any, ...]:
        found = choice(output)
        if found is None:
            raise CannotReplay(
                f"the recorded routing cannot be used: {type(module).__name__} does not return expert ids and weights"
            )
        ids_CS, weights_CS, place = found
        begin = self._done[index]
        end = self._done[index] = begin + len(ids_CS) // len(self.ids_BWLS)
        part = np.s_[:, begin:end, index]
        recorded_CS = torch.from_numpy(self.ids_BWLS[part].reshape(ids_CS.shape)).to(ids_CS)
        values_CS = torch.from_numpy(self.weights_BWLS[part].reshape(ids_CS.shape)).to(weights_CS)
        known_C1 = recorded_CS[:, :1] != NOT_ROUTED
        if self._keeps_same_sets:
            known_C1 &= (recorded_CS.sort(-1).values != ids_CS.sort(-1).values).any(-1, keepdim=True)
        replaced = list(output)
        replaced[place] = torch.where(known_C1, recorded_CS, ids_CS)
        replaced[1] = torch.where(known_C1, values_CS, weights_CS)
        return tuple(replaced)


def _rows(parts: Sequence[Routing], batch: ForwardBatch) -> list[Routing]:
    places_N = torch.from_numpy(batch.places_N)
    num_rows = len(batch.tokens_BW)
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in batch.rows]

    def cut(values: Sequence[Any]) -> Sequence[Any]:
        wide = torch.cat([part.unflatten(0, (num_rows, -1)) for part in values], dim=1).flatten(0, 1)
        return wide[places_N.to(wide.device)].cpu().split(lengths)  # type: ignore[no-any-return]

    ids, weights = cut([part.expert_ids for part in parts]), cut([part.expert_weights for part in parts])
    return [Routing(expert_ids=one, expert_weights=other) for one, other in zip(ids, weights, strict=True)]
