"""Run a sequence through both executions, judge each operator, and compute how much its error contributes to the
mismatch.

Shapes: T response tokens in a sequence, S sums over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...tracer.located.results import A, B, Router
from ...tracer.store import first_line
from ..recorded import RecordedRow
from .head import Head, judge_head
from .judged import OF_CODE, Judged, Judgement, Point
from .names import kind_of, layer_of
from .pooled import Apart, Pooled
from .reference import Reference
from .taps import RowTaps
from .vllm_execution import AnyExecution
from .windows import Window

CARRIED = "operators' shares of the mismatch"


class SequenceJudge:
    """Judge of the operators in one sequence, one window of layers after another."""

    def __init__(
        self,
        row: RecordedRow,
        executions: Mapping[str, AnyExecution],
        reference: Reference,
        windows: Sequence[Window],
        listen: Callable[[Window], dict[str, RowTaps]],
        heard: dict[str, RowTaps],
        pooled: Pooled,
    ):
        """`heard` has the values of both executions in the last window, `pooled` their log-probabilities; `listen` runs
        the row in any window."""
        self._row, self._executions, self._reference = row, executions, reference
        self._windows, self._listen, self._heard, self._pooled = windows, listen, heard, pooled
        self._positions = {side: taps.first_position for side, taps in heard.items()}
        self._judgements: dict[tuple[str, Window], Judgement] = {}
        self._heads: dict[str, Head] = {}
        self._apart: dict[str, tuple[Apart, Apart]] = {}
        """Operator -> difference between both executions in the operator's inputs, and in its outputs."""

    def judge(self, is_asked: Callable[[str], bool]) -> None:
        """Add the findings of the sequence to `pooled`, with the errors of operators selected by `is_asked`."""
        row, pooled = self._row, self._pooled
        d_T = np.where(row.scored, pooled.logprobs[B][row.seq_id] - pooled.logprobs[A][row.seq_id], 0.0)
        for position in sorted(set(self._positions.values())):
            sides = [side for side in (A, B) if self._positions[side] == position]
            products: list[dict[Point, float]] = [{} for _ in sides]
            if d_T.any():
                temperature = self._executions[A].numerics.temperature
                try:
                    products = self._reference.carried(
                        row, d_T, temperature, position, self._windows, partial(self._errors, sides)
                    )
                except OF_CODE as error:  # for example, code through which autograd cannot differentiate
                    pooled.unjudged[CARRIED] = f"{type(error).__name__}: {first_line(error)}"
            for window in reversed(self._windows):
                if left := [side for side in sides if (side, window) not in self._judgements]:
                    self._errors(left, window)
            for side, own in zip(sides, products, strict=True):
                for each, product in self._of_side(side, own, d_T):
                    pooled.kinds.add(each.kind)
                    if is_asked(each.operator):
                        pooled.add(side, row.seq_id, each, product if side == B or product is None else -product)
        for name, apart in self._apart.items():
            pooled.apart[name].append(apart)

    def _of_side(
        self, side: str, products: Mapping[Point, float], d_T: np.ndarray
    ) -> Iterator[tuple[Judged, float | None]]:
        """Yield a side's operators in order, the head last, each with the contribution of its error to sum(d *
        logprobs)."""
        for window in self._windows:
            for each in self._judgements[side, window].operators:
                yield each, None if each.point is None else products.get(each.point)
        for each, own_T in self._heads[side]:
            yield each, float((d_T * np.nan_to_num(own_T)).sum())

    def _errors(self, sides: Sequence[str], window: Window) -> list[dict[Point, Any]]:
        """Judge the operators of the given sides in a window of layers; return the errors introduced on each side."""
        taps, pooled = self._heard, self._pooled
        is_last = window is self._windows[-1]
        if not is_last or any(side not in taps for side in sides):
            taps = self._listen(window)
        if not any(of is window for _, of in self._judgements):
            self._compare(taps[A], taps[B])
        for side in sides:
            execution = self._executions[side]
            found = self._reference.judge(self._row, taps[side], execution, self._positions[side], window)
            if is_last:
                logprobs_T = pooled.logprobs[side][self._row.seq_id]
                self._heads[side] = judge_head(execution, self._reference, self._row, taps[side], logprobs_T)
            self._judgements[side, window] = found
            pooled.unjudged |= {f"{side} {name}": why for name, why in found.unjudged.items()}
            del taps[side]
        return [self._judgements[side, window].errors for side in sides]

    def _compare(self, a: RowTaps, b: RowTaps) -> None:
        """Note by how much both executions differ at each operator's inputs and outputs, and where they choose
        different experts."""
        self._pooled.unseen |= {kind_of(name) for name in set(a.calls) ^ set(b.calls)}
        for name, ours in a.calls.items():
            if (theirs := b.calls.get(name)) is not None:
                for router in _routers(name, ours.gives, theirs.gives):
                    self._pooled.add_router(router)
                self._apart[name] = _apart(ours.takes, theirs.takes), _apart(ours.gives, theirs.gives)


def _apart(a: Sequence[Any], b: Sequence[Any]) -> Apart:
    """Return the difference between the first two floating-point tensors that can be compared."""
    for ours, theirs in zip(a, b, strict=False):
        if ours is None or theirs is None or not ours.is_floating_point() or ours.numel() != theirs.numel():
            continue
        exact = ours.double()
        off = (theirs.double().reshape(ours.shape) - exact).flatten()
        return float(off.dot(off)), float(exact.flatten().dot(exact.flatten()))
    return float("nan"), float("nan")


def _routers(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[Router]:
    """Yield the number of tokens for which the two executions choose different experts, if this is a router."""
    for a, b in zip(ours, theirs, strict=False):
        if a is not None and b is not None and not a.is_floating_point() and a.shape == b.shape and a.dim() == 2:
            flipped_T = (a.sort(-1).values != b.sort(-1).values).any(-1)
            yield Router(
                operator=name,
                layer=layer_of(name),
                num_tokens=len(a),
                num_flipped=int(flipped_T.sum()),
                margin=_margin(ours, a, flipped_T),
            )


def _margin(gives: Sequence[Any], ids: Any, flipped_T: Any) -> float | None:
    """Return the largest margin among tokens whose experts differ, i.e. the lowest chosen score minus the highest score
    not chosen.
    """
    import torch

    wide = [each for each in gives if each is not None and each.is_floating_point() and each.shape[-1] > ids.shape[-1]]
    if not wide or not bool(flipped_T.any()):
        return None
    scores, chosen = wide[0][flipped_T].double(), ids[flipped_T].long()
    rest = scores.scatter(-1, chosen, -torch.inf).amax(-1)
    margins = scores.gather(-1, chosen).amin(-1) - rest
    return float(margins.max()) if bool((margins >= 0).all()) else None
