from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ...tracer.located import A, B, Divergence, OperatorError, Router, WeightDifference
from .judged import Judged

CODE_DIFFERS = 4e-6
"""Code counts as equivalent to the recorded model's if, in float64, no token's relative error exceeds this value. Code
that uses float32 internally stays below it."""
_UNDONE = "differs from the recorded model's code, but has no effect: float64 log-probabilities are the same"
_IS_OTHER_TENSOR = 0.5
"""A tensor with more than this fraction of its elements changed counts as a different tensor, not a modified one."""

Apart = tuple[float, float]
"""(||b - a||^2, ||a||^2), where a and b are the two executions' values. NaN if the values cannot be compared."""
Operator = tuple[str, str]
Found = dict[Operator, list[tuple[str, Judged]]]
"""Results by operator, each paired with its sequence id."""


@dataclass(slots=True)
class Pooled:
    judged: Found = field(default_factory=lambda: defaultdict(list))
    in_double: Found = field(default_factory=lambda: defaultdict(list))
    same_in_double: dict[str, bool] = field(default_factory=dict)
    """For each side with user code, True if that code matches the recorded model in float64."""
    apart: dict[str, list[tuple[Apart, Apart]]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, dict[str, np.ndarray]] = field(default_factory=lambda: {A: {}, B: {}})
    """Response log-probabilities [T] by side and sequence (nats)."""
    products: dict[Operator, dict[str, float]] = field(default_factory=dict)
    routers: dict[str, Router] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    unjudged: dict[str, str] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)

    def add(self, side: str, seq_id: str, found: Judged, product: float | None) -> None:
        self.judged[side, found.operator].append((seq_id, found))
        if product is not None:
            own = self.products.setdefault((side, found.operator), {})
            own[seq_id] = own.get(seq_id, 0.0) + product

    def add_router(self, router: Router) -> None:
        known = self.routers.get(router.operator, replace(router, num_tokens=0, num_flipped=0, margin=None))
        self.routers[router.operator] = replace(
            known,
            num_tokens=known.num_tokens + router.num_tokens,
            num_flipped=known.num_flipped + router.num_flipped,
            margin=max((each for each in (known.margin, router.margin) if each is not None), default=None),
        )

    def operators(self) -> Iterator[OperatorError]:
        """Yield each operator's error over all sequences. Operators judged only in float64 come last."""
        for (side, name), found in self.judged.items():
            yield self._operator(side, name, found)
        for (side, name), found in self.in_double.items():
            differing = [(seq_id, replace(each, ratio=0.0)) for seq_id, each in found if each.largest > CODE_DIFFERS]
            # `judged` may lack this operator: in the side's own dtype, rounding may hide its error, or it may have
            # another name.
            if differing and (side, name) not in self.judged:
                yield self._operator(side, name, differing)

    def _operator(self, side: str, name: str, found: list[tuple[str, Judged]]) -> OperatorError:
        in_double = [each for _, each in self.in_double.get((side, name), ())]
        seq_id, worst = max(found, key=lambda item: item[1].ratio)
        number = sum(each.num_values for _, each in found)
        square = sum(each.num_values * each.error**2 for _, each in found)
        # A layer's residual stream is checked in two places. Take the position in forward order from the check that
        # shows the error.
        orders = [each.order for _, each in found if each.ratio > 1.0] or [
            each.order for each in in_double if each.largest > CODE_DIFFERS
        ]
        apart = self.apart.get(name, ())
        return OperatorError(
            side=side, order=min(orders or [each.order for _, each in found]), operator=name, kind=worst.kind,
            layer=worst.layer, dtype=worst.dtype, num_values=number,
            introduced=float(np.sqrt(square / max(number, 1))), ratio=worst.ratio, seq_id=seq_id, token=worst.token,
            inherited=_relative([before for before, _ in apart]),
            difference=_relative([behind for _, behind in apart]),
            in_double=max((each.largest for each in in_double), default=None),
        )  # fmt: skip


def _relative(parts: list[Apart]) -> float | None:
    off, size = (sum(part[i] for part in parts) for i in range(2))
    return None if not parts or np.isnan(off) else float(np.sqrt(off / size)) if size else 0.0


def first_divergence(
    operators: Iterable[OperatorError], weights: Iterable[WeightDifference], pooled: Pooled
) -> Divergence | None:
    """Return the first operator where rounding does not explain the difference, or None. Differences without effect on
    float64 log-probabilities go to `pooled.unjudged`."""
    undone = {side for side, is_same in pooled.same_in_double.items() if is_same}
    counted = []
    for each in operators:
        is_undone = each.side in undone and (each.in_double or 0.0) > CODE_DIFFERS
        if is_undone:
            pooled.unjudged[f"{each.side} {each.operator}"] = _UNDONE
        else:
            counted.append(each)
    foreign = {
        (each.side, each.tensor.rpartition(".")[0]): each
        for each in weights
        if not (each.side in undone and each.share > _IS_OTHER_TENSOR)
    }
    for each in sorted(counted, key=lambda each: each.order):
        held = foreign.get((each.side, each.operator))
        if held is not None or each.is_beyond or (each.in_double or 0.0) > CODE_DIFFERS:
            return Divergence(
                side=each.side, operator=each.operator, kind=each.kind, layer=each.layer,
                why="weights" if held is not None else "beyond" if each.is_beyond else "code", ratio=each.ratio,
                version=None if held is None else held.version, seq_id=each.seq_id, token=each.token,
            )  # fmt: skip
    return None
