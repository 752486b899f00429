"""Wraps functions of other libraries, reads the arguments of their calls, and restores the originals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MISSING = object()


class Patches:
    """Functions wrapped by recording. `restore` puts the originals back, in reverse order."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
        """Make `owner.name(...)` call `wrapper(original, ...)`; return False if `owner` has no such function."""
        original = getattr(owner, name, None)
        if not callable(original):
            return False

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        @functools.wraps(original)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await wrapper(original, *args, **kwargs)

        # The wrapper of a coroutine function must be one too, since Ray checks for it.
        is_coroutine = inspect.iscoroutinefunction(original)
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, awaited if is_coroutine else wrapped)
        return True

    def wrap_all(self, owner: Any, wrappers: Mapping[str, Callable[..., Any]]) -> list[str]:
        """Wrap several functions of an owner; return the names of missing ones."""
        return [name for name, wrapper in wrappers.items() if not self.wrap(owner, name, wrapper)]

    @property
    def wrapped(self) -> list[tuple[Any, str]]:
        """The owner and the name of every wrapped function."""
        return [(owner, name) for owner, name, _ in self._originals]

    def restore(self) -> None:
        while self._originals:
            _put_back(*self._originals.pop())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute in this context; afterwards it is what it was, or inherited again."""
    original = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        _put_back(owner, name, original)


def _put_back(owner: Any, name: str, original: Any) -> None:
    if original is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def arguments(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by name, without `self`. Entries of **kwargs are included under their own names.

    Raises TypeError if the arguments do not match the function.
    """
    bound: dict[str, Any] = dict(_signature(function).bind(*args, **kwargs).arguments)
    bound.pop("self", None)
    more: dict[str, Any] = bound.pop("kwargs", {})
    return bound | more


@functools.lru_cache(maxsize=32)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)
