"""Wrap functions of other libraries, and list those libraries' tested versions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_MISSING = object()
Original = Callable[..., Any]
Points = Mapping[str, tuple[str, str]]
"""Maps a function's name to the hook method that wraps it and the data recorded from its calls."""


class Patches:
    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
        """Make `owner.name(...)` call `wrapper(original, ...)`. Return False if there is no such function."""
        original = getattr(owner, name, None)
        if not callable(original):
            return False

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        @functools.wraps(original)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await wrapper(original, *args, **kwargs)

        # Ray checks whether a function is a coroutine function, so its wrapper must be a coroutine function too.
        is_coroutine = inspect.iscoroutinefunction(original)
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, awaited if is_coroutine else wrapped)
        return True

    def wrap_points(self, owner: type, hooks: Any, points: Points, around: Original | None = None) -> dict[str, str]:
        """Wrap a class's functions with methods of `hooks`. If given, `around(method, ...)` is called instead.

        Returns the missing functions, mapped to the data lost without them.
        """
        missing = {}
        for name, (method, lost) in points.items():
            hook = getattr(hooks, method)
            if not self.wrap(owner, name, hook if around is None else functools.partial(around, hook)):
                missing[f"{owner.__qualname__}.{name}"] = lost
        return missing

    def restore(self) -> None:
        while self._originals:
            _put_back(*self._originals.pop())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
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
    """Return a call's arguments by name, without `self`. Raises TypeError if they do not match the signature."""
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
"""Tested releases (major.minor) of each library. Other releases are noted in the trace."""


def untested(library: str, version: str) -> bool:
    return ".".join(version.split("+")[0].split(".")[:2]) not in TESTED[library]


def tested_releases(library: str) -> str:
    return ", ".join(f"{release}.x" for release in TESTED[library])


def version_sentence(library: str, version: str, missing: Mapping[str, str]) -> str | None:
    """Return a note if the release is untested or functions are missing, otherwise None. `missing` maps each missing
    function to the data lost without it."""
    if not missing and not untested(library, version):
        return None
    lost = "; ".join(f"{what} ({name} was not found)" for name, what in missing.items())
    found = f"not recorded: {lost}" if missing else "all functions needed for recording were found"
    status = f" is not a tested version (tested: {tested_releases(library)})" if untested(library, version) else ""
    return f"{library} {version}{status}; training is not affected; {found}"
