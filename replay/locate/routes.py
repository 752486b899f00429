"""Replaces one execution's expert choices with the other's, where the two differ.

Shapes: T tokens in a sequence, L routers, S experts selected per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from ...tracer.routing import NOT_ROUTED, Routing, routers
from ..backends.routing import followed
from ..backends.vllm_mixture import mixtures, names_of
from ..batching import ForwardBatch
from ..recorded import RecordedRow
from .execution import Execution
from .grafts import cast
from .taps import RowTaps
from .vllm_execution import AnyExecution, VllmExecution


def choices(
    giver: AnyExecution, rows: Sequence[RecordedRow], of: list[RecordedRow], wanted: Callable[[str], bool]
) -> dict[str, Routing]:
    """Return sequence -> expert ids and weights, [T, L, S] each, chosen by an execution's routers for `rows`.

    The rows run in the batches of the step's rows `of`.

    `wanted` selects routers by name; the ids for other routers are NOT_ROUTED.
    """
    found: dict[str, Routing] = {}
    if isinstance(giver, VllmExecution):
        own = [names_of(name, module)[0] for name, module in mixtures(giver.model).items()]
        without = [not wanted(name) for name in own]
        _, taps = giver.listen(rows, of, lambda name: name in own)
        for seq_id, heard_of in taps.items():
            _, weights, ids = (_stacked(heard_of, own, slot) for slot in range(3))
            ids[:, without] = NOT_ROUTED
            found[seq_id] = Routing(expert_ids=ids, expert_weights=weights)
        return found

    known = routers(giver.model)
    names = {id(module): name for name, module in giver.model.named_modules()}
    without = [not wanted(names[id(router.module)]) for router in known]
    chosen = {row.seq_id for row in rows}

    @contextmanager
    def heard(batch: ForwardBatch) -> Iterator[None]:
        into: list[Routing] = []
        with followed(known, batch, None, into):
            yield
        for row, routing in zip(batch.rows, into, strict=True):
            if row.seq_id in chosen:
                ids_TLS = routing.expert_ids.numpy().copy()
                ids_TLS[:, without] = NOT_ROUTED
                found[row.seq_id] = Routing(expert_ids=ids_TLS, expert_weights=routing.expert_weights.double().numpy())

    giver.score(rows, of, heard)
    return found


def score_with(
    taker: Execution, chosen: Mapping[str, Routing], rows: Sequence[RecordedRow], of: list[RecordedRow]
) -> dict[str, np.ndarray]:
    """Return sequence -> the taker's [T] float64 log-probabilities, with `chosen` wherever it would use other experts.

    A token with the same set of experts keeps the taker's own weights and order, so that no earlier difference is
    included. Other rows in a forward pass keep the taker's own choices.
    """
    known = routers(taker.model)
    shape = next(iter(chosen.values())).expert_ids.shape[1:]

    def of_row(row: RecordedRow) -> Routing:
        empty = np.full((row.num_tokens, *shape), NOT_ROUTED)
        return chosen.get(row.seq_id) or Routing(expert_ids=empty, expert_weights=np.zeros(empty.shape))

    def forced(batch: ForwardBatch) -> AbstractContextManager[Any]:
        return followed(known, batch, [of_row(row) for row in batch.rows], [], keeps_same_sets=True)

    return taker.score(rows, of, forced)


def _stacked(taps: RowTaps, names: Sequence[str], slot: int) -> np.ndarray:
    """Return [T, L, ...]: one output of each router, stacked by layer."""
    stacked = torch.stack([cast(taps.calls[name].gives[slot], torch.float64) for name in names], dim=1)
    return np.asarray(stacked.cpu().numpy())
