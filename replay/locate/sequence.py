"""Run a sequence through both executions, judge each operator, and compute how much its error contributes to the
mismatch.

Shapes: T response tokens in a sequence, S sums over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ...tracer.located.results import A, B, Router
from ...tracer.store import first_line
from ..recorded import RecordedRow
from .head import Head, judge_head
from .judged import OF_CODE, Judged, Judgement, Point
from .names import kind_of, layer_of
from .reference import Reference
from .taps import RowTaps
from .vllm_execution import AnyExecution, VllmExecution
from .windows import Window

CARRIED = "operators' shares of the mismatch"
Apart = tuple[float, float]
"""Two sums of squares: of the difference between the values in both executions, and of the values in execution a. NaN
if the values cannot be compared."""


@dataclass(slots=True, kw_only=True)
class JudgedSequence:
    """One sequence, with each of its operators compared with float64."""

    seq_id: str
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    """Side -> [T] log-probabilities of the response in that side's execution, nats."""
    judged: list[tuple[str, Judged]] = field(default_factory=list)
    """Pairs of a side and the result for one operator that the question asks about."""
    products: list[tuple[str, str, float]] = field(default_factory=list)
    """Triples of side, operator, and contribution of one of the operator's errors to the sum of squared mismatch d^2,
    in nats^2."""
    apart: dict[str, tuple[Apart, Apart]] = field(default_factory=dict)
    """Operator -> difference between both executions in the operator's inputs, and in its outputs."""
    unseen: set[str] = field(default_factory=set)
    """Kinds of operators that only one execution has."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Operator that could not be judged, or another part of the work that failed -> reason."""
    routers: list[Router] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    """Kinds of all operators that could be judged."""
    is_whole: bool = True
    """True if vLLM ran the sequence in a single forward pass; also True if neither execution is vLLM."""

    def values(self, side: str) -> np.ndarray:
        """Return the [T] float64 log-probabilities of the response in one execution."""
        return np.array(self.logprobs[side], np.float64)


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
        logprobs: Mapping[str, np.ndarray],
    ):
        """Store the values of both executions in the last window (`heard`, `logprobs`); `listen` runs the row in any
        window."""
        self._row, self._executions, self._reference = row, executions, reference
        self._windows, self._listen, self._heard = windows, listen, heard
        self._logprobs = logprobs
        self._positions = {side: taps.first_position for side, taps in heard.items()}
        self._judgements: dict[tuple[str, Window], Judgement] = {}
        self._heads: dict[str, Head] = {}
        self._result = JudgedSequence(seq_id=row.seq_id)

    def judged(self, is_asked: Callable[[str], bool]) -> JudgedSequence:
        """Return the sequence with all operators judged; only errors of operators selected by `is_asked` are kept."""
        row, result = self._row, self._result
        d_T = np.where(row.scored, self._logprobs[B] - self._logprobs[A], 0.0)
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
                    result.unjudged[CARRIED] = f"{type(error).__name__}: {first_line(error)}"
            for window in reversed(self._windows):
                if left := [side for side in sides if (side, window) not in self._judgements]:
                    self._errors(left, window)
            for side, own in zip(sides, products, strict=True):
                for each, product in self._of_side(side, own, d_T):
                    result.kinds.add(each.kind)
                    if is_asked(each.operator):
                        result.judged.append((side, each))
                        if product is not None:
                            result.products.append((side, each.operator, product if side == B else -product))
        result.logprobs = {side: self._logprobs[side].tolist() for side in (A, B)}
        engines = [each for each in self._executions.values() if isinstance(each, VllmExecution)]
        result.is_whole = all(each.takes_whole_rows for each in engines)
        return result

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
        """Judge the operators of some sides in a window of layers; return the errors introduced on each side."""
        taps, result = self._heard, self._result
        is_last = window is self._windows[-1]
        if not is_last or any(side not in taps for side in sides):
            taps = self._listen(window)
        if not any(of is window for _, of in self._judgements):
            _set_apart(result, taps[A], taps[B])
        for side in sides:
            execution = self._executions[side]
            found = self._reference.judge(self._row, taps[side], execution, self._positions[side], window)
            if is_last:
                self._heads[side] = judge_head(execution, self._reference, self._row, taps[side], self._logprobs[side])
            self._judgements[side, window] = found
            result.unjudged |= {f"{side} {name}": why for name, why in found.unjudged.items()}
            del taps[side]
        return [self._judgements[side, window].errors for side in sides]


def _set_apart(result: JudgedSequence, a: RowTaps, b: RowTaps) -> None:
    """Store by how much both executions differ at each operator's inputs and outputs, and where they choose different
    experts."""
    result.unseen |= {kind_of(name) for name in set(a.calls) ^ set(b.calls)}
    for name, ours in a.calls.items():
        if (theirs := b.calls.get(name)) is not None:
            result.routers += _routers(name, ours.gives, theirs.gives)
            result.apart[name] = _apart(ours.takes, theirs.takes), _apart(ours.gives, theirs.gives)


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
    """Return the largest margin among tokens whose experts differ: lowest chosen score minus highest score not
    chosen."""
    import torch

    wide = [each for each in gives if each is not None and each.is_floating_point() and each.shape[-1] > ids.shape[-1]]
    if not wide or not bool(flipped_T.any()):
        return None
    scores, chosen = wide[0][flipped_T].double(), ids[flipped_T].long()
    rest = scores.scatter(-1, chosen, -torch.inf).amax(-1)
    margins = scores.gather(-1, chosen).amin(-1) - rest
    return float(margins.max()) if bool((margins >= 0).all()) else None
