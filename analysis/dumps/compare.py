"""Find where the tensors of two dumps start to differ by more than rounding.

Shapes: T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from ...schemas.errors import NothingToCompare
from ...schemas.results import Result
from ...tracer.progress import Progress, no_progress
from ..rows import Rows, table
from .difference import DumpDifference, difference
from .folder import DumpFolder, Entry, Spot
from .layout import DumpTokens, Unmatched, reconciled
from .names import INPUT_IDS, MASK, OUTPUT, POSITIONS, TensorPlace
from .sources import Pair, Shards, pairs, shards, whole

_GROWTH = 4.0
"""Factor by which the operators between two dumped tensors may amplify the largest error found in earlier tensors."""
_ROUNDINGS, _WORST_ROUNDINGS = 8.0, 16.0
"""Rounding error allowed in addition to amplified earlier errors, for a whole tensor and for a single token, in unit roundoffs
of the coarsest dtype."""
_FLOAT32 = 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Comparison of one tensor that both sides dumped."""

    place: str
    layer: int | None
    forward: int
    name_a: str
    name_b: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    rms: float | None
    """RMS of the difference, relative to the RMS of both tensors; None for integers."""
    worst: float | None
    """Relative RMS difference for the token with the largest error; None for integers."""
    token: int | None
    """Index, not counting padding, of the token with the largest error; for integers, of the first token that differs."""
    max_abs: float
    units: float | None
    """`rms` in unit roundoffs of the coarsest dtype among this tensor and all earlier ones; None for integers."""
    ratio: float | None
    """The larger of `rms` and `worst`, each divided by the bound that follows from the errors in earlier tensors; above 1,
    rounding does not explain the difference."""
    num_different: int | None
    """Number of integers that differ; None for floating-point tensors."""
    num_nonfinite_a: int
    num_nonfinite_b: int
    why: str | None
    """Why the tensor counts as different: nonfinite, beyond (the bound), or differs (positions only); None if rounding may
    explain the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCompared:
    """A tensor that both sides dumped but that cannot be compared."""

    place: str
    forward: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpComparison(Result):
    """Comparison of two folders of dumped tensors, with one row per tensor found in both, in forward order."""

    _text = "tim_trace.analysis.dumps.text:dumps_text"

    a: str
    b: str
    order: str
    """Source of the order of the tensors: dump_index or dump.json, from a or b, or layers."""
    num_forwards_a: int
    num_forwards_b: int
    tokens_checked: bool
    """True if both sides dumped input_ids, which the comparison found to be equal."""
    first: TensorDifference | None
    """First tensor with non-finite values; without such values, the first tensor whose difference rounding does not explain."""
    before: TensorDifference | None
    """The last floating-point tensor before `first`."""
    tensors: tuple[TensorDifference, ...]
    not_compared: tuple[NotCompared, ...]
    only_a: tuple[str, ...]
    """Names of the tensors in a without a counterpart in b."""
    only_b: tuple[str, ...]
    num_gradients: int
    """Number of gradients and parameters in both folders, which are not compared."""


def locate_dumps(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, progress: Progress = no_progress
) -> DumpComparison:
    """Find the first tensor of two dumped forwards whose difference rounding does not explain.

    `a` and `b` are folders of dumped tensors: from SGLang's dumper, msprobe, or .pt, .npy, .npz and .safetensors files
    named after modules. The comparison finds differences but not which side is wrong, since without weights and inputs
    there is no exact result to compare with. Files are read as data; a file that references code is refused.

    Raises ImportFailed for a file that is damaged, hostile or a link, NothingToCompare if the dumps share no tensor or
    were made from different tokens.
    """
    sides = DumpFolder(a), DumpFolder(b)
    tokens = {forward: _tokens(*sides, forward) for forward in range(min(side.num_forwards for side in sides))}
    found = pairs(*sides)
    if not found:
        examples = [next(iter(side.spots.values()))[0].name for side in sides]
        raise NothingToCompare(
            f"{a} and {b} have no name in common: one has {examples[0]!r}, the other {examples[1]!r}"
        )
    judge, tensors, refused = _Judge(), [], []
    with progress("comparing", len(found)) as advance:
        for pair in found:
            try:
                tensors.append(_compared(pair, sides, tokens[pair.forward], judge))
            except Unmatched as error:
                refused.append(NotCompared(place=str(pair.place), forward=pair.forward, reason=str(error)))
            advance(1)
    first = next((row for row in tensors if row.why == "nonfinite"), None) or next(
        (row for row in tensors if row.why), None
    )
    earlier = tensors[: tensors.index(first)] if first is not None else []
    return DumpComparison(
        a=str(a), b=str(b), order=_order(*sides), num_forwards_a=sides[0].num_forwards, num_forwards_b=sides[1].num_forwards,
        tokens_checked=all(of is not None for pair_of in tokens.values() for of in pair_of), first=first,
        before=next((row for row in reversed(earlier) if row.rms is not None), None), tensors=tuple(tensors),
        not_compared=tuple(refused), only_a=tuple(_left(sides[0], {s for p in found for s in p.a.spots})),
        only_b=tuple(_left(sides[1], {s for p in found for s in p.b.spots})),
        num_gradients=sum(side.num_gradients for side in sides),
    )  # fmt: skip


def dumps_rows(found: DumpComparison, by: str = "operator") -> Rows:
    """Return one row per tensor, or the worst tensor of each layer."""
    rows = list(found.tensors)
    if by == "layer":
        worst: dict[tuple[int, int | None], TensorDifference] = {}
        for row in rows:
            known = worst.setdefault((row.forward, row.layer), row)
            if (row.ratio or 0.0) > (known.ratio or 0.0):
                worst[row.forward, row.layer] = row
        rows = list(worst.values())
    return table(rows)


def _order(a: DumpFolder, b: DumpFolder) -> str:
    return f"{a.order} of a" if a.order else f"{b.order} of b" if b.order else "layers"


def _left(side: DumpFolder, used: set[Spot]) -> Iterator[str]:
    yield from dict.fromkeys(entries[0].name for spot, entries in side.spots.items() if spot not in used)


class _Judge:
    """Bound on the error that rounding may have accumulated, updated from tensor to tensor in forward order."""

    def __init__(self) -> None:
        self._rms = self._worst = self._unit = 0.0
        self._num_terms = 1

    def ratio(self, found: DumpDifference, unit: float, num_terms: int) -> tuple[float, float]:
        """Return the next tensor's error divided by the bound on rounding errors, and the unit roundoff used for the bound.

        A sum of n products in float32 adds min(n, 8 sqrt(n)) of its roundoffs (Higham and Mary 2019, theorem 3.1); n is
        at most the longest axis among this tensor and earlier ones.
        """
        self._unit, self._num_terms = max(self._unit, unit), max(self._num_terms, num_terms)
        terms = 2 * min(self._unit, _FLOAT32) * min(self._num_terms, 8 * sqrt(self._num_terms))
        ratio = max(
            found.rms / (_GROWTH * self._rms + _ROUNDINGS * self._unit + terms),
            found.worst / (_GROWTH * self._worst + _WORST_ROUNDINGS * self._unit + terms),
        )
        if ratio <= 1:
            self._rms, self._worst = max(self._rms, found.rms), max(self._worst, found.worst)
        return ratio, self._unit


def _compared(
    pair: Pair, sides: tuple[DumpFolder, DumpFolder], tokens: tuple[DumpTokens | None, DumpTokens | None], judge: _Judge
) -> TensorDifference:
    of_a, of_b = shards(pair.a, sides[0], sides[1]), shards(pair.b, sides[1], sides[0])
    if of_a.is_float != of_b.is_float:
        raise Unmatched(f"dtypes {of_a.dtype} and {of_b.dtype}")
    if not all(value.size for each in (of_a, of_b) for value in each.values):
        raise Unmatched("it has no values")
    shapes = [_shape(each.values) for each in (of_a, of_b)]
    a, b = reconciled(*whole(of_a.values, of_b.values), *tokens)
    row = _integers(pair, a, b) if not of_a.is_float else _numbers(a, b, of_a, of_b, judge)
    return TensorDifference(
        place=str(pair.place), layer=pair.place.layer, forward=pair.forward, name_a=of_a.name, name_b=of_b.name,
        dtype_a=of_a.dtype, dtype_b=of_b.dtype, shape_a=shapes[0], shape_b=shapes[1], **row,
    )  # fmt: skip


def _numbers(a: np.ndarray, b: np.ndarray, of_a: Shards, of_b: Shards, judge: _Judge) -> dict[str, Any]:
    found = difference(a, b)
    # Values that are equal on both sides do not reveal the compute dtype: tensors of a float32 model, such as masks, may also
    # be exact in bfloat16.
    unit = max((each.held_unit if found.rms else each.unit) for each in (of_a, of_b))
    ratio, unit = judge.ratio(found, unit, max(a.shape, default=1))
    is_odd = bool(found.num_nonfinite_a or found.num_nonfinite_b)
    return {
        "rms": found.rms, "worst": found.worst, "token": found.token, "max_abs": found.max_abs, "units": found.rms / unit,
        "ratio": ratio, "num_different": None, "num_nonfinite_a": found.num_nonfinite_a,
        "num_nonfinite_b": found.num_nonfinite_b,
        "why": "nonfinite" if is_odd else "beyond" if ratio > 1 else None,
    }  # fmt: skip


def _integers(pair: Pair, a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    differs = (a != b).reshape(len(a) if a.ndim else 1, -1)
    number = int(differs.sum())
    largest = np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0)
    return {
        "rms": None, "worst": None, "token": int(differs.any(1).argmax()) if number else None, "max_abs": float(largest),
        "units": None, "ratio": None, "num_different": number, "num_nonfinite_a": 0, "num_nonfinite_b": 0,
        "why": "differs" if number and pair.place.module == POSITIONS else None,
    }  # fmt: skip


def _shape(values: list[np.ndarray]) -> tuple[int, ...]:
    return tuple(values[0].shape) if len(values) == 1 else (len(values), *values[0].shape)


def _tokens(a: DumpFolder, b: DumpFolder, forward: int) -> tuple[DumpTokens | None, DumpTokens | None]:
    """Return the tokens that both sides dumped for a forward. Raises NothingToCompare if they differ."""
    of_a, of_b = _tokens_of(a, forward), _tokens_of(b, forward)
    if of_a is None or of_b is None:
        return None, None
    if len(of_a.ids_T) != len(of_b.ids_T):
        raise NothingToCompare(
            f"forward {forward}: a has {len(of_a.ids_T):,} tokens and b {len(of_b.ids_T):,}, so there is nothing to compare; where "
            "one side pads, dump its attention_mask, and where it took several forwards, dump one"
        )
    if not np.array_equal(of_a.ids_T, of_b.ids_T):
        token = int((of_a.ids_T != of_b.ids_T).argmax())
        raise NothingToCompare(
            f"forward {forward}: input_ids differ from token {token} on ({of_a.ids_T[token]} in a, {of_b.ids_T[token]} in b), so "
            "there is nothing to compare; dump forwards of the same tokens"
        )
    return of_a, of_b


def _tokens_of(side: DumpFolder, forward: int) -> DumpTokens | None:
    ids, mask = (_integer_array(side, name, forward) for name in (INPUT_IDS, MASK))
    return None if ids is None else DumpTokens.of(ids, mask)


def _integer_array(side: DumpFolder, name: str, forward: int) -> np.ndarray | None:
    entries: list[Entry] = side.spots.get(Spot(TensorPlace(None, name, OUTPUT), forward, 0), [])
    if not entries:
        return None
    value = side.read(entries[0])
    return value.array if not value.is_float and value.array.ndim in (1, 2) else None
