"""The precision of activations, and the number of slices per number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Precision:
    """Rounding of numbers kept in float64 tensors: to `dtype` wherever the transformers model would round."""

    dtype: Any
    """torch's dtype of weights and activations."""

    @property
    def slices(self) -> int:
        """Slices per number: two represent at least 36 bits relative to a vector's largest element, three at least 51.

        Sums of an fp64 replay are thus as accurate as float64's; rotary tables are float32, as in transformers.
        """
        import torch

        return 3 if self.dtype == torch.float64 else 2

    def round(self, x: Any) -> Any:
        """Round to the activations' dtype."""
        return rounded(x, self.dtype)

    def wide(self, x: Any) -> Any:
        """Round to the dtype of norms, routing and logits in transformers: float32, or float64 for a float64 model."""
        import torch

        return rounded(x, torch.float64 if self.dtype == torch.float64 else torch.float32)


def rounded(x: Any, dtype: Any) -> Any:
    """Round a float64 tensor to `dtype`, through float32, so that CPU and GPU round the same way."""
    import torch

    if dtype == torch.float64:
        return x
    single = x.to(torch.float32)
    return (single if dtype == torch.float32 else single.to(dtype)).to(torch.float64)
