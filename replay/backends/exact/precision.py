"""Which numbers an activation may be, and how many slices hold one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Precision:
    """Numbers are kept in float64 tensors; where the transformers model would round, they are rounded to `dtype`."""

    dtype: Any
    """torch's, of weights and activations."""

    @property
    def slices(self) -> int:
        """Slices of a number: two hold 36 bits or more of a vector's largest, three 51 or more.

        So an fp64 replay has sums as good as float64's; its rotary tables are float32, as transformers' are.
        """
        import torch

        return 3 if self.dtype == torch.float64 else 2

    def round(self, x: Any) -> Any:
        """To the activations' dtype."""
        return rounded(x, self.dtype)

    def wide(self, x: Any) -> Any:
        """To what transformers computes norms, routing and logits in: float32, or float64 for a float64 model."""
        import torch

        return rounded(x, torch.float64 if self.dtype == torch.float64 else torch.float32)


def rounded(x: Any, dtype: Any) -> Any:
    """A float64 tensor rounded to the numbers of `dtype`, to float32 first: so do a CPU and a GPU by different ways."""
    import torch

    if dtype == torch.float64:
        return x
    single = x.to(torch.float32)
    return (single if dtype == torch.float32 else single.to(dtype)).to(torch.float64)
