"""Wrap functions of other libraries, read their calls' arguments, and list the tested versions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_MISSING = object()
Original = Callable[..., Any]
"""A library function, as it was before wrapping."""
Points = Mapping[str, tuple[str, str]]
"""For each library function: the method that hooks it, and the data recorded from its calls."""


class Patches:
    """Functions that recording has wrapped. `restore` puts the originals back, in reverse order."""

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

        # Ray checks for coroutine functions, so the wrapper of one must be one too.
        is_coroutine = inspect.iscoroutinefunction(original)
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, awaited if is_coroutine else wrapped)
        return True

    def wrap_all(self, owner: Any, wrappers: Mapping[str, Callable[..., Any]]) -> list[str]:
        """Wrap several functions; return the names of missing ones."""
        return [name for name, wrapper in wrappers.items() if not self.wrap(owner, name, wrapper)]

    def wrap_points(self, owner: type, hooks: Any, points: Points) -> dict[str, str]:
        """Wrap functions of a class with methods of `hooks`; return the data lost by each missing function."""
        wrappers = {name: getattr(hooks, method) for name, (method, _) in points.items()}
        return {f"{owner.__qualname__}.{name}": points[name][1] for name in self.wrap_all(owner, wrappers)}

    @property
    def wrapped(self) -> list[tuple[Any, str]]:
        """(owner, name) of every wrapped function."""
        return [(owner, name) for owner, name, _ in self._originals]

    def restore(self) -> None:
        while self._originals:
            _put_back(*self._originals.pop())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within the block, then restore the previous value, inherited or not."""
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
    """Bind a call's arguments by name, with **kwargs unpacked and `self` dropped. Raises TypeError."""
    bound: dict[str, Any] = dict(_signature(function).bind(*args, **kwargs).arguments)
    bound.pop("self", None)
    more: dict[str, Any] = bound.pop("kwargs", {})
    return bound | more


_signature = functools.lru_cache(maxsize=32)(inspect.signature)


TESTED: Mapping[str, Sequence[str]] = {
    "trl": ("0.24", "1.0", "1.8", "1.12", "1.16"),
    "verl": ("0.9",),
    "vllm": ("0.17", "0.27", "0.32"),
}
"""Tested releases of each library, as major.minor; `make matrix` runs the same ones."""


def untested(library: str, version: str) -> bool:
    return ".".join(version.split("+")[0].split(".")[:2]) not in TESTED[library]


def tested_releases(library: str) -> str:
    return ", ".join(f"{release}.x" for release in TESTED[library])


def version_sentence(library: str, version: str, missing: Mapping[str, str]) -> str | None:
    """Describe an untested release or missing functions, if any; `missing` maps a function to the data it supplies."""
    if not missing and not untested(library, version):
        return None
    lost = "; ".join(f"{what} ({name} was not found)" for name, what in missing.items())
    found = f"not recorded: {lost}" if missing else "all functions that recording needs exist, but they were not tested"
    return (
        f"{library} {version} is not a tested version (tested: {tested_releases(library)}); training is not affected; "
        f"{found}"
    )
