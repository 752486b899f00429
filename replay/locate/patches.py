"""Measures the mismatch that remains when operators of one execution are computed by the other's code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ...tracer.located.results import ROUTES, A, B, Patch
from ...tracer.progress import Progress
from ...tracer.store import first_line
from ..recorded import RecordedRow
from .grafts import graft_of
from .judged import OF_CODE
from .names import kind_of
from .pooled import Pooled
from .routes import choices, score_with
from .vllm_execution import AnyExecution

Names = Callable[[str], bool]
"""Selects operators by name."""


def patched(
    executions: Mapping[str, AnyExecution],
    rows: Sequence[RecordedRow],
    of: list[RecordedRow],
    pooled: Pooled,
    wanted: Names,
    is_asked: Names,
    progress: Progress,
) -> Iterator[Patch]:
    """Patch each execution in turn for `rows`, scored in the batches of the rows `of`; `wanted` selects routers,
    `is_asked` operators.
    """
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
                        given = choices(executions[other], rows, of, wanted)
                        scored = score_with(graft.taker, given, rows, of)
                    else:
                        scored = graft.score(operators, rows, of)
                except OF_CODE as error:
                    if not any(each.is_other_code for each in executions.values()):
                        raise
                    pooled.unjudged[f"patch {name} in {side}"] = f"{type(error).__name__}: {first_line(error)}"
                    continue
                yield Patch(
                    patch=name,
                    taker=side,
                    num_operators=flipped if operators is None else len(operators),
                    squares_left=tuple(
                        float(np.square((scored[row.seq_id] - pooled.logprobs[other][row.seq_id])[row.scored]).sum())
                        for row in rows
                    ),
                )


def _plans(names: Sequence[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield groups of operators that are replaced together, with their names: each kind, and all of them."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[kind_of(name)].append(name)
    for kind, members in kinds.items():
        yield kind, frozenset(members)
    yield "all operators", frozenset(names)
