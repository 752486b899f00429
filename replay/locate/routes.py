"""Replaces one execution's expert choices with the other's, where the two differ.

Shapes: T tokens in a sequence, L routers, S experts selected per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ...tracer.routing import NOT_ROUTED, Routing, routers
from ..backends.routing import Table, followed
from ..backends.vllm_mixture import Select, mixtures, names_of, selecting
from ..batching import ForwardBatch
from ..recorded import RecordedRow
from .exact_execution import ExactExecution
from .execution import Execution
from .grafts import cast
from .taps import RowTaps
from .vllm_execution import AnyExecution, Span, VllmExecution


def choices(
    giver: AnyExecution, rows: Sequence[RecordedRow], of: list[RecordedRow], wanted: Callable[[str], bool]
) -> dict[str, Routing]:
    """Return sequence -> expert ids and weights, [T, L, S] each, chosen by an execution's routers for `rows`.

    The rows run in the batches of the step's rows `of`.

    `wanted` selects routers by name; the ids for other routers are NOT_ROUTED.
    """
    found: dict[str, Routing] = {}
    names, own = {row.seq_id for row in rows}, _names(giver)
    without = [not wanted(name) for name in own]
    if not _is_transformers(giver):
        _, taps = giver.listen(rows, of, lambda name: name in own)
        for seq_id, heard_of in taps.items():
            _, weights, ids = (_stacked(heard_of, own, slot) for slot in range(3))
            ids[:, without] = NOT_ROUTED
            found[seq_id] = Routing(expert_ids=ids, expert_weights=weights)
        return found

    known = routers(giver.model)

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

    assert isinstance(giver, Execution)
    giver.score(rows, of, heard)
    return found


def score_with(
    taker: AnyExecution, chosen: Mapping[str, Routing], rows: Sequence[RecordedRow], of: list[RecordedRow]
) -> dict[str, np.ndarray]:
    """Return sequence -> the taker's [T] float64 log-probabilities, with `chosen` wherever it would use other experts.

    A token with the same set of experts keeps the taker's own weights and order, so that no earlier difference is
    included. Other rows in a forward pass keep the taker's own choices.
    """
    if isinstance(taker, VllmExecution):
        with _forced_in_engine(taker, chosen, rows):
            return taker.score(rows, of)
    known = routers(taker.model)
    shape = next(iter(chosen.values())).expert_ids.shape[1:]

    def of_row(row: RecordedRow) -> Routing:
        empty = np.full((row.num_tokens, *shape), NOT_ROUTED)
        return chosen.get(row.seq_id) or Routing(expert_ids=empty, expert_weights=np.zeros(empty.shape))

    @contextmanager
    def forced(batch: ForwardBatch) -> Iterator[None]:
        if isinstance(taker, ExactExecution):
            with _forced(taker, Table(known, batch, [of_row(row) for row in batch.rows], True), _names(taker)):
                yield
            return
        with followed(known, batch, [of_row(row) for row in batch.rows], [], keeps_same_sets=True):
            yield

    return taker.score(rows, of, forced)


@contextmanager
def _forced(taker: ExactExecution, table: Table, names: Sequence[str]) -> Iterator[None]:
    """Make the exact engine's routers choose the experts in a table, in this context."""
    operators, precision = taker.exact.operators(), taker.exact.precision

    def given(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            logits, weights, ids = table.replace(index, original, args, original(*args))
            return logits, precision.round(weights), ids

        return called

    with ExitStack() as stack:
        for index, name in enumerate(names):
            stack.enter_context(operators[name].replaced(given(index, operators[name].call)))
        yield


@contextmanager
def _forced_in_engine(
    taker: VllmExecution, chosen: Mapping[str, Routing], rows: Sequence[RecordedRow]
) -> Iterator[None]:
    """Make vLLM's routers use the choices in `chosen` wherever they would use other experts, in this context."""
    import torch

    now: list[Span] = []

    def begin(spans: list[Span], _positions_W: Any) -> None:
        now[:] = spans

    def given(index: int) -> Callable[[Select, Any, Any], tuple[Any, Any]]:
        def choose(select: Select, hidden: Any, logits: Any) -> tuple[Any, Any]:
            weights, ids = (part.clone() for part in select(hidden, logits))
            for seq_id, where, first in now:
                if (routing := chosen.get(seq_id)) is None:
                    continue
                part = slice(first, first + where.stop - where.start)
                ids_PS = torch.from_numpy(routing.expert_ids[part, index]).to(ids)
                weights_PS = torch.from_numpy(routing.expert_weights[part, index]).to(weights)
                differs_P1 = (ids_PS.sort(-1).values != ids[where].sort(-1).values).any(-1, keepdim=True)
                differs_P1 &= ids_PS[:, :1] != NOT_ROUTED
                ids[where] = torch.where(differs_P1, ids_PS, ids[where])
                weights[where] = torch.where(differs_P1, weights_PS, weights[where])
            return weights, ids

        return choose

    with ExitStack() as stack:
        stack.enter_context(taker.following(rows, begin))
        for index, module in enumerate(mixtures(taker.model).values()):
            stack.enter_context(selecting(module, given(index)))
        yield


def _is_transformers(execution: AnyExecution) -> bool:
    return type(execution) is Execution


def _names(execution: AnyExecution) -> list[str]:
    """Return the names of an execution's routers, in layer order."""
    if isinstance(execution, VllmExecution):
        return [names_of(name, module)[0] for name, module in mixtures(execution.model).items()]
    names = {id(module): name for name, module in execution.model.named_modules()}
    return [names[id(router.module)] for router in routers(execution.model)]


def _stacked(taps: RowTaps, names: Sequence[str], slot: int) -> np.ndarray:
    """Return [T, L, ...]: one output of each router, stacked by layer."""
    import torch

    stacked = torch.stack([cast(taps.calls[name].gives[slot], torch.float64) for name in names], dim=1)
    return np.asarray(stacked.cpu().numpy())
