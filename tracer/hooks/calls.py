"""The arguments of a call that is being wrapped."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any


def arguments(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name, without self; those that the function takes as **kwargs among them.

    Raises TypeError when the call does not fit the function.
    """
    bound: dict[str, Any] = dict(_signature(function).bind(*args, **kwargs).arguments)
    bound.pop("self", None)
    more: dict[str, Any] = bound.pop("kwargs", {})
    return bound | more


@lru_cache(maxsize=32)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)
