"""Compute logits from captured hidden states and the head weights of the policy version that scored them.

Shapes: C tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.errors import DamagedTrace, WeightsMissing
from ...tracer.dense_group import widen
from ...tracer.journal import BFLOAT16
from ...tracer.store import Store
from ...tracer.weights.checkpoints import open_weights
from ...tracer.weights.reader import Tensor

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Head:
    """Weights of an output head, rounded as in the pass, and the operations that follow the matrix product."""

    weight_VH: Array
    bias_V: Array | None
    dtype: str
    """torch's name for the dtype of the projection."""
    scale: float | None
    softcap: float | None
    logits_dtype: str | None

    def logits(self, hidden_CH: Array) -> Array:
        """Return [C, V] logits before temperature.

        Products are accumulated in float32 (float64 for a float64 pass) and rounded to the dtype of the pass wherever
        the pass rounded. Only the summation order may differ from that of the pass's kernel, which can change the last
        bit of a logit.
        """
        logits_CV = rounded(hidden_CH, self.dtype) @ self.weight_VH.T
        if self.bias_V is not None:
            logits_CV = logits_CV + self.bias_V
        logits_CV = rounded(logits_CV, self.dtype)
        if self.scale is not None:
            logits_CV = rounded(logits_CV * self.scale, self.dtype)
        if self.softcap is not None:
            ratio_CV = rounded(np.tanh(rounded(logits_CV / self.softcap, self.dtype)), self.dtype)
            logits_CV = rounded(ratio_CV * self.softcap, self.dtype)
        return logits_CV if self.logits_dtype is None else rounded(logits_CV, self.logits_dtype)


class Heads:
    """Output heads of a trace by policy version; the most recently used one is cached."""

    def __init__(self, store: Store):
        self.store = store
        self._weights: Any = None
        self._held: tuple[Any, Head] | None = None

    def head(self, contract: Mapping[str, Any], version: int | None, attempt: int | None, hidden_dtype: str) -> Head:
        """Return the head described in a contract's `head`, for a policy version and training attempt.

        Raises WeightsMissing, DamagedTrace.
        """
        described = contract.get("head")
        if described is None:
            raise DamagedTrace(
                f"{self.store.url}: a contract does not describe the head that projects its hidden states"
            )
        if version is None:
            raise WeightsMissing(
                f"{self.store.url}: hidden states were recorded without a policy version, so their head is unknown"
            )
        key = (version, attempt, hidden_dtype, repr(sorted(described.items())))
        if self._held is None or self._held[0] != key:
            self._held = None
            self._held = (key, self._load(described, version, attempt, described["projection_dtype"] or hidden_dtype))
        return self._held[1]

    def _load(self, described: Mapping[str, Any], version: int, attempt: int | None, dtype: str) -> Head:
        if self._weights is None:
            self._weights = open_weights(self.store)
        tensors = self._weights.load(version, attempt)

        def values(names: list[str]) -> Array:
            name = next((name for name in names if name in tensors), None)
            if name is None:
                raise WeightsMissing(f"{self.store.url}: version {version} has no tensor {' or '.join(names)}")
            return rounded(rounded(numbers(tensors[name]), described["weight_dtype"]), dtype)

        return Head(
            weight_VH=values(described["weight"]),
            bias_V=values(described["bias"]) if described["bias"] else None,
            dtype=dtype,
            scale=described["scale"],
            softcap=described["softcap"],
            logits_dtype=described["logits_dtype"],
        )


def numbers(tensor: Tensor) -> Array:
    """Return the values of a tensor; bfloat16 is converted to float32."""
    if tensor.dtype == BFLOAT16:
        return widen(tensor.bits, BFLOAT16)
    return tensor.bits.view(np.dtype(tensor.dtype))


def rounded(values: Array, dtype: str) -> Array:
    """Return values rounded to a dtype, to nearest with ties to even, as float32, or as float64 if the dtype is
    float64."""
    if dtype == "float64":
        return values.astype(np.float64)
    if dtype != BFLOAT16:
        return values.astype(np.dtype(dtype)).astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), kept.view(np.float32), values).astype(np.float32)
