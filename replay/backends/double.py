from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):  # type: ignore[misc]
    """Context manager that skips casts from float64 to float32, so that norms and softmax stay in float64."""

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
