"""Where two executions diverge: what `locate` found, with shares of the mismatch and their intervals.

Shapes: S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schemas.results import Result
from ..tracer.located.results import Divergence, Located, OperatorError, Router, WeightDifference
from .rows import Rows, table
from .statistics.estimators import Array
from .statistics.intervals import Interval, NoInterval, bootstrap, ends

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShare:
    """What a kind of operator, or a layer, of one execution carries of the gap's mean square."""

    side: str
    kind: str
    layer: int | None
    num_operators: int
    carried: float
    """Of mean d^2, by its operators' own errors, to first order; below 0 where they make the gap smaller."""
    carried_low: float | None
    carried_high: float | None
    ratio: float
    """Largest own error in units of the bound of what rounding can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchShare:
    """What of the gap's mean square is gone where one execution computes some operators by the other's code."""

    patch: str
    taker: str
    num_operators: int
    removed: float
    """Of mean d^2; below 0 where the gap grows."""
    removed_low: float | None
    removed_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Location(Result):
    """Where two executions part over some sequences of a step: d = logprob(b) - logprob(a), nats."""

    _text = "tim_trace.analysis.locate_text:location_text"

    run: str
    step: int
    policy_version: int
    """Of the recorded weights."""
    device: str
    """`cpu` or `cuda`."""
    a: str
    b: str
    only: str
    """What alone was looked at: `layers 2:8`, `operators q_proj,rotary`, or both; empty where everything was."""
    chosen: str
    num_sequences: int
    num_groups: int
    """What is resampled for the intervals."""
    no_interval: str | None
    """Why shares have no interval, in words; None where they have one."""
    num_tokens: int
    mean_abs_d: float
    max_abs_d: float
    gap_rms: float
    """Root mean square of d, nats."""
    explained: float | None
    """What all operators' own errors carry together: 1 where the model is linear in them; None without a gap."""
    first: Divergence | None
    weights: tuple[WeightDifference, ...]
    routers: tuple[Router, ...]
    kinds: tuple[OperatorShare, ...]
    layers: tuple[OperatorShare, ...]
    patches: tuple[PatchShare, ...]
    operators: tuple[OperatorError, ...]
    unseen: tuple[str, ...]
    """Operators that only one execution has."""
    unjudged: dict[str, str]
    """What has a form that is not understood, and why it could not be judged."""
    engines: tuple[str, ...]
    """The sides that vLLM ran: eager, neither compiled nor in CUDA graphs, and without a prefix cache."""
    kept: str | None = None
    """Path in the trace where the result lies; None where it is not kept."""
    not_kept: str | None = None
    """Why it could not be kept; None where it is, and where that was not asked for."""


def location(found: Located, *, kept: str | None = None, not_kept: str | None = None) -> Location:
    """Shares of the gap, with 95 % intervals over groups of a prompt, by bootstrap-t."""
    shares = _Shares(found)
    total = float(sum(each.sum_square for each in found.sequences))
    kinds = tuple(shares.carried(lambda each: (each.side, each.kind, None)))
    interval = shares.interval(np.array([each.sum_square for each in found.sequences]) / 2)
    return Location(
        run=found.run, step=found.step, policy_version=found.policy_version, device=found.device, a=found.a, b=found.b,
        only=found.only, chosen=found.chosen, num_sequences=len(found.sequences),
        num_groups=len({each.group for each in found.sequences}),
        no_interval=interval.value if interval is NoInterval.FEW else None, num_tokens=found.num_tokens,
        mean_abs_d=found.mean_abs_d, max_abs_d=found.max_abs_d, gap_rms=(total / max(found.num_tokens, 1)) ** 0.5,
        explained=sum(each.carried for each in kinds) if total else None, first=found.first, weights=found.weights,
        routers=found.routers, kinds=kinds, layers=tuple(shares.carried(lambda each: (each.side, "", each.layer))),
        patches=tuple(shares.patched()), operators=found.operators, unseen=found.unseen, unjudged=found.unjudged,
        engines=found.engines, kept=kept, not_kept=not_kept,
    )  # fmt: skip


class _Shares:
    """Sums of sequences as shares of the gap."""

    def __init__(self, found: Located):
        self._found = found
        self._place = {each.seq_id: place for place, each in enumerate(found.sequences)}
        self._square_S = np.array([each.sum_square for each in found.sequences])
        self._group_S = np.unique([each.group for each in found.sequences], return_inverse=True)[1]

    def carried(self, key: Callable[[OperatorError], tuple[str, str, int | None]]) -> Iterator[OperatorShare]:
        """A row a key, the largest share first."""
        products = self._found.products()
        groups: dict[tuple[str, str, int | None], list[OperatorError]] = {}
        for each in self._found.operators:
            if (each.side, each.operator) in products:
                groups.setdefault(key(each), []).append(each)
        rows = []
        for (side, kind, layer), members in groups.items():
            own = [products[side, each.operator] for each in members]
            share, low, high = self._share(self._summed(item for each in own for item in each.items()))
            rows.append(OperatorShare(
                side=side, kind=kind, layer=layer, num_operators=len(members), carried=share, carried_low=low,
                carried_high=high, ratio=max(each.ratio for each in members),
            ))  # fmt: skip
        yield from sorted(rows, key=lambda row: -row.carried)

    def patched(self) -> Iterator[PatchShare]:
        """A row a patch, in their order."""
        groups: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
        for each in self._found.patches:
            left = groups.setdefault((each.name, each.taker, each.num_operators), [])
            left.append((each.seq_id, each.sum_square_left))
        for (patch, taker, num), left in groups.items():
            share, low, high = self._share(self._square_S - self._summed(left))
            yield PatchShare(
                patch=patch, taker=taker, num_operators=num, removed=share, removed_low=low, removed_high=high
            )

    def _summed(self, values: Iterable[tuple[str, float]]) -> Array:
        sums_S = np.zeros(len(self._place))
        for seq_id, value in values:
            sums_S[self._place[seq_id]] += value
        return sums_S

    def _share(self, value_S: Array) -> tuple[float, float | None, float | None]:
        total = float(self._square_S.sum())
        low, high = ends(self.interval(value_S)) or (None, None)
        return float(value_S.sum()) / total if total else 0.0, low, high

    def interval(self, value_S: Array) -> Interval | NoInterval:
        """Of the sum of values over that of squares."""
        if not self._square_S.any():
            return NoInterval.UNDEFINED
        sums = {"value": value_S, "square": self._square_S}
        return bootstrap({"share": lambda t: t["value"] / t["square"]}, sums, self._group_S, _CONFIDENCE)["share"]


def location_rows(found: Location, by: str = "kind") -> Rows:
    """A row a kind of operator, an operator, a layer, or a patch."""
    tables: dict[str, Sequence[Any]] = {
        "kind": found.kinds, "operator": found.operators, "layer": found.layers, "patch": found.patches,
    }  # fmt: skip
    return table(tables[by]).without({"kind": ("layer",), "layer": ("kind",)}.get(by, ()))
