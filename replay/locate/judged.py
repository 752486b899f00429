"""Compare the values from an execution with exact values.

Shapes: T tokens, X all other axes of a tensor, flattened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .windows import Window

Point = tuple[str, str, int]
"""Key of a recorded value: operator call name, TAKES or GIVES, and tensor index."""
TAKES, GIVES = "takes", "gives"
OF_CODE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_ORDERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    operator: str
    """Module name, or a name such as `layers.7.residual` for a computation between modules."""
    kind: str
    layer: int | None
    order: int
    num_values: int
    error: float
    """RMS of the introduced error, relative to the RMS of the exact result."""
    largest: float
    """Largest RMS error in a single token, relative to the RMS of the token's exact result."""
    ratio: float
    """Largest introduced error divided by its bound. inf if an expert choice differs, or if one side is not finite."""
    token: int
    """Index (in the prompt and response) of the token with the largest ratio."""
    dtype: str
    point: Point | None = None
    """Point where the operator's error enters the forward pass, or None for expert choices and the head."""


@dataclass(slots=True)
class Judgement:
    window: Window
    operators: list[Judged] = field(default_factory=list)
    """In forward order, without the head."""
    errors: dict[Point, Any] = field(default_factory=dict)
    """Introduced error at each point (observed minus exact), float32 [T, ...]."""
    unjudged: dict[str, str] = field(default_factory=dict)
    attended: set[int | None] = field(default_factory=set)

    def add(
        self, operator: str, kind: str, layer: int | None, found: Any, exact: Any, bound: Any,
        point: Point | None = None,
    ) -> None:  # fmt: skip
        """Compare values [T, ...] with exact ones, given elementwise bounds. Store the error under `point`."""
        if not self._owns(layer):
            return
        off = found.double() - exact
        if point is not None:
            self.errors[point] = off.type(torch.float32)  # `float` would keep float64 here
        self._append(operator, kind, layer, point=point, **_measured(found, off, exact, bound))

    def add_differing(self, operator: str, kind: str, layer: int | None, differs: Any, num_values: int) -> None:
        """Judge integers that must be equal, such as expert choices. `differs` [T, ...] is True where they differ."""
        if not self._owns(layer) or not bool(differs.any()):
            return
        rows = differs.flatten(1).any(1) if differs.dim() > 1 else differs
        self._append(
            operator, kind, layer, num_values=num_values, error=float(differs.double().mean()), largest=1.0,
            ratio=float("inf"), token=int(rows.int().argmax()), dtype="int64",
        )  # fmt: skip

    def _owns(self, layer: int | None) -> bool:
        if layer is None:
            return self.window.is_last if self.attended else not self.window.first
        return self.window.has(layer)

    def _append(self, operator: str, kind: str, layer: int | None, **measured: Any) -> None:
        order = 1 if self.window.first is None else self.window.first * _ORDERS + 1
        order = self.operators[-1].order + 1 if self.operators else order
        self.operators.append(Judged(operator=operator, kind=kind, layer=layer, order=order, **measured))


def judged(operator: str, kind: str, order: int, found: Any, exact: Any, bound: Any) -> Judged:
    measured = _measured(found, found.double() - exact, exact, bound)
    return Judged(operator=operator, kind=kind, layer=None, order=order, **measured)


def ratio(found: Any, exact: Any, bound: Any) -> float:
    return float(_measured(found, found.double() - exact, exact, bound)["ratio"])


def _measured(found: Any, off: Any, exact: Any, bound: Any) -> dict[str, Any]:
    """Return the fields of `Judged` that are computed from values. Modifies `off` (the float64 error) in place."""
    off_TX, exact_TX = off.reshape(len(off), -1), exact.reshape(len(exact), -1)
    off_T = torch.linalg.vector_norm(off_TX, dim=1)
    size_T = torch.linalg.vector_norm(exact_TX, dim=1)
    nonfinite_T = None
    if not bool((off_T + size_T).isfinite().all()):
        found_TX = found.reshape(off_TX.shape)
        both = found_TX.isfinite() & exact_TX.isfinite()
        nonfinite_T = (found_TX.isfinite() != exact_TX.isfinite()).any(1)
        off_TX, exact_TX = torch.where(both, off_TX, 0.0), torch.where(both, exact_TX, 0.0)
        off_T, size_T = (torch.linalg.vector_norm(values, dim=1) for values in (off_TX, exact_TX))
    bound_TX = torch.as_tensor(bound, dtype=torch.float64, device=off.device).expand(exact.shape).reshape(off_TX.shape)
    ratio_TX = off_TX.abs_().div_(bound_TX)
    ratio_T = ratio_TX.amax(1)
    if bool(ratio_T.isnan().any()):  # 0 / 0: no error where the bound is 0
        ratio_T = ratio_TX.nan_to_num_(nan=0.0, posinf=float("inf")).amax(1)
    if nonfinite_T is not None:
        ratio_T = torch.where(nonfinite_T, float("inf"), ratio_T)
    token = int(ratio_T.argmax())
    per_value, per_token = max(off_TX.numel(), 1) ** 0.5, off_TX.shape[1] ** 0.5
    error, size = (float(torch.linalg.vector_norm(values)) / per_value for values in (off_T, size_T))
    relative_T = (off_T / per_token) / (size_T / per_token).clamp_min(1e-3 * size + 1e-300)
    return {
        "num_values": off_TX.numel(),
        "error": error / size if size else float(off_T.max()),
        "largest": float("inf") if nonfinite_T is not None and bool(nonfinite_T.any()) else float(relative_T.max()),
        "ratio": float(ratio_T[token]),
        "token": token,
        "dtype": str(found.dtype).removeprefix("torch."),
    }
