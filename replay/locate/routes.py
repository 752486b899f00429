"""A mixture's choices of experts, of one execution given to the other, where the two differ.

Shapes: T tokens of a sequence, L routers, S experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ...tracer.routing import NOT_ROUTED, Routing, routers
from ..backends.routing import followed
from ..batching import ForwardBatch
from ..recorded import RecordedRow
from .execution import Execution


def choices(
    giver: Execution, rows: Sequence[RecordedRow], of: list[RecordedRow], wanted: Callable[[str], bool]
) -> dict[str, Routing]:
    """Sequence -> ids [T, L, S] and weights [T, L, S] that an execution's routers chose, of some rows `of` a step.

    `wanted` says of a router's name whether it counts; of others the ids are NOT_ROUTED.
    """
    known, found = routers(giver.model), dict[str, Routing]()
    names = {row.seq_id for row in rows}
    routers_of = {id(module): name for name, module in giver.model.named_modules()}
    without = [not wanted(routers_of[id(router.module)]) for router in known]

    @contextmanager
    def heard(batch: ForwardBatch) -> Iterator[None]:
        into: list[Routing] = []
        with followed(known, batch, None, into):
            yield
        for row, routing in zip(batch.rows, into, strict=True):
            if row.seq_id in names:
                ids_TLS = routing.expert_ids.numpy().copy()
                ids_TLS[:, without] = NOT_ROUTED
                found[row.seq_id] = Routing(expert_ids=ids_TLS, expert_weights=routing.expert_weights.double().numpy())

    giver.score(rows, of, heard)
    return found


def score_with(
    taker: Execution, chosen: Mapping[str, Routing], rows: Sequence[RecordedRow], of: list[RecordedRow]
) -> dict[str, np.ndarray]:
    """Sequence -> [T] float64 log-probabilities of the taker's, with these choices wherever it would use other experts.

    A token with the same set of experts keeps the taker's own weights and order: else what lies before a router would come
    along. Neighbours of a forward that are not among the rows choose for themselves.
    """
    known = routers(taker.model)
    shape = next(iter(chosen.values())).expert_ids.shape[1:]

    def of_row(row: RecordedRow) -> Routing:
        empty = np.full((row.num_tokens, *shape), NOT_ROUTED)
        return chosen.get(row.seq_id) or Routing(expert_ids=empty, expert_weights=np.zeros(empty.shape))

    @contextmanager
    def forced(batch: ForwardBatch) -> Iterator[None]:
        with followed(known, batch, [of_row(row) for row in batch.rows], [], keeps_same_sets=True):
            yield

    return taker.score(rows, of, forced)
