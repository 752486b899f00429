"""Keep float64 models in float64 even in norms and softmax, which transformers computes in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):  # type: ignore[misc]
    """A context in which casts from float64 to float32 have no effect.

    Tensors of other dtypes are unaffected, so rotary frequencies, which models define in float32, stay float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
