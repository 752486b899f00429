"""Measure how much mismatch remains if one execution uses the other's operators or expert choices.

Shapes: T tokens in a sequence, L routers, S experts selected per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from ...tracer.located import ROUTES, A, B, Patch
from ...tracer.progress import Progress
from ...tracer.routing import NOT_ROUTED, Routing, routers
from ...tracer.store import first_line
from ..backends.routing import followed
from ..backends.vllm_mixture import mixtures, names_of
from ..batching import ForwardBatch
from ..recorded import RecordedRow
from .execution import Execution
from .grafts import cast, graft_of
from .judged import OF_CODE
from .names import kind_of
from .pooled import Pooled
from .vllm_execution import VllmExecution

Names = Callable[[str], bool]


def patched(
    executions: Mapping[str, Execution], rows: Sequence[RecordedRow], of: list[RecordedRow], pooled: Pooled,
    wanted: Names, is_asked: Names, progress: Progress,
) -> Iterator[Patch]:  # fmt: skip
    """Patch the operators that `is_asked` selects, and the choices of the routers that `wanted` selects, in each
    execution. Yield the mismatch that remains after each patch."""
    made = {(side, other): graft_of(executions[side], executions[other]) for side, other in ((B, A), (A, B))}
    grafts = {side: (graft, other) for (side, other), graft in made.items() if graft is not None}
    flipped = sum(each.num_flipped > 0 for each in pooled.routers.values())
    routes: list[tuple[str, frozenset[str] | None]] = [(ROUTES, None)] if flipped else []
    plans = {
        side: [*_plans([name for name in graft.names(rows, of) if is_asked(name)]), *routes]
        for side, (graft, _) in grafts.items()
    }
    with progress("patching operators", sum(map(len, plans.values()))) as advance:
        for side, (graft, other) in grafts.items():
            for name, operators in plans[side]:
                advance(1)
                try:
                    if operators is None:
                        scored = _score_with(graft.taker, _choices(executions[other], rows, of, wanted), rows, of)
                    else:
                        scored = graft.score(operators, rows, of)
                except OF_CODE as error:
                    if not any(each.is_other_code for each in executions.values()):
                        raise
                    pooled.unjudged[f"patch {name} in {side}"] = f"{type(error).__name__}: {first_line(error)}"
                    continue
                number, target = flipped if operators is None else len(operators), pooled.logprobs[other]
                left = ((scored[row.seq_id] - target[row.seq_id])[row.scored] for row in rows)
                squares = tuple(float(np.square(d_T).sum()) for d_T in left)
                yield Patch(patch=name, taker=side, num_operators=number, squares_left=squares)


def _plans(names: Sequence[str]) -> list[tuple[str, frozenset[str]]]:
    kinds = dict.fromkeys(map(kind_of, names))
    of_kind = [(kind, frozenset(name for name in names if kind_of(name) == kind)) for kind in kinds]
    return [*of_kind, ("all operators", frozenset(names))]


def _choices(giver: Execution, rows: Sequence[RecordedRow], of: list[RecordedRow], wanted: Names) -> dict[str, Routing]:
    """Return router choices [T, L, S] by sequence. Routers that `wanted` does not select get NOT_ROUTED."""
    found: dict[str, Routing] = {}
    if isinstance(giver, VllmExecution):
        own = [names_of(name, module)[0] for name, module in mixtures(giver.model).items()]
        without = [not wanted(name) for name in own]
        _, taps = giver.listen(rows, of, lambda name: name in own)
        for seq_id, heard_of in taps.items():
            weights_TLS, ids_TLS = (
                torch.stack([cast(heard_of.calls[name].gives[slot], torch.float64) for name in own], dim=1)
                .cpu()
                .numpy()
                for slot in (1, 2)
            )
            ids_TLS[:, without] = NOT_ROUTED
            found[seq_id] = Routing(expert_ids=ids_TLS, expert_weights=weights_TLS)
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


def _score_with(
    taker: Execution, chosen: Mapping[str, Routing], rows: Sequence[RecordedRow], of: list[RecordedRow]
) -> dict[str, np.ndarray]:
    """Return the taker's float64 logprobs [T] by sequence with its routers forced to choose the experts in `chosen`. For
    tokens where the taker would choose the same experts anyway, its own expert weights and order are kept, so that only
    differing choices have an effect."""
    known = routers(taker.model)
    shape = next(iter(chosen.values())).expert_ids.shape[1:]

    def of_row(row: RecordedRow) -> Routing:
        empty = np.full((row.num_tokens, *shape), NOT_ROUTED)
        return chosen.get(row.seq_id) or Routing(expert_ids=empty, expert_weights=np.zeros(empty.shape))

    def forced(batch: ForwardBatch) -> AbstractContextManager[Any]:
        return followed(known, batch, [of_row(row) for row in batch.rows], [], keeps_same_sets=True)

    return taker.score(rows, of, forced)
