"""Lazy imports and argument checks for public functions."""

from __future__ import annotations

import gc
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from numbers import Integral, Real
from types import ModuleType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import EXTRAS, NotInstalled, WrongType


class LazyPackage(ModuleType):
    """A package that imports its public names on first use.

    A public name takes precedence over a submodule of the same name: `analysis.check` is always the function.
    """

    _sources: Mapping[str, str]

    def __getattr__(self, name: str) -> object:
        if name not in self._sources:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with collector_paused(), telling_missing():
            value = checked(getattr(import_module(self._sources[name], self.__name__), name))
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule sets it as an attribute of the package. Prevent this if it would hide a public object of
        # the same name.
        if not (name in self._sources and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._sources})


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, which otherwise accounts for a sixth of the import time of torch and transformers."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def telling_missing() -> Iterator[None]:
    """Raise NotInstalled if the block imports a missing library. The message names the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name in EXTRAS:
            way = "pip install 'tim-trace[{0}]' or, in a clone, pip install '.[{0}]'".format(EXTRAS[name])
            raise NotInstalled(f"{name} is not installed; {way}") from error
        from importlib import metadata  # imported here to keep startup fast

        required = [each for each in metadata.requires("tim-trace") or () if "extra ==" not in each]
        if not any(re.match(rf"{re.escape(name)}\b", each) for each in required):
            raise
        raise NotInstalled(
            f"{name} is not installed; this may be a recorder-only installation. Run pip install tim-trace, or open "
            "the trace on a machine with the full installation"
        ) from error


def make_lazy(package: str, sources: Mapping[str, str]) -> None:
    """Make a package import its public names on first use. `sources` maps each name to its module."""
    module = sys.modules[package]
    vars(module)["_sources"] = sources
    module.__class__ = LazyPackage


_Public = TypeVar("_Public", bound=Callable[..., object])

_NAMES: dict[object, str] = {
    str: "a str", os.PathLike: "a path", bool: "True or False", int: "an int", float: "a number", type(None): "None",
    Mapping: "a dict", dict: "a dict",
}  # fmt: skip


def checked(public: _Public) -> _Public:
    """Wrap a function so that it raises WrongType if an argument does not match its annotation. Return classes
    unchanged."""
    if not isinstance(public, types.FunctionType):
        return public
    from inspect import signature as signature_of  # imported here to keep startup fast

    signature = signature_of(public)

    @wraps(public)
    def call(*args: object, **options: object) -> object:
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError:  # the call below raises the usual TypeError for wrong arguments
            given = {}
        check_arguments(public, given)
        with telling_missing():
            return public(*args, **options)

    return cast(_Public, call)


def check_arguments(owner: Callable[..., object], values: Mapping[str, object], *, name: str = "") -> None:
    hints = _hints(owner)
    for option, value in values.items():
        if option in hints and not fits(value, hints[option]):
            what = name or owner.__qualname__.removesuffix(".__init__")
            expected = " or ".join(_wanted(hints[option]))
            raise WrongType(f"{what}: {option}: got {_shown(value)}, expected {expected}")


def fits(value: object, hint: object) -> bool:
    """Return True if a value matches an annotation. Unsupported annotations match any value."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in arguments)
    if origin in (Sequence, tuple, list):
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            return False
        return not arguments or all(fits(element, arguments[0]) for element in value)
    if origin in (int, float):
        return isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
    if origin is Any or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return True
    return isinstance(value, origin)


_hints = cache(get_type_hints)


def _wanted(hint: object) -> list[str]:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(word for choice in arguments for word in _wanted(choice)))
    if origin in (Sequence, tuple, list):
        return [f"a list ({' or '.join(_wanted(arguments[0]))})" if arguments else "a list"]
    return [_NAMES.get(origin) or str(getattr(origin, "__name__", origin))]


def _shown(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    return f"a {type(value).__name__} object"
