"""Packages that import their public names on first use."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package whose public functions and classes are imported from other modules on first use.

    Importing a submodule of the same name does not shadow a public name: `analysis.check` is always the function. Use an
    import statement for the submodule (`from tim_trace.analysis.check import thresholds`).
    """

    _sources: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._sources:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from .arguments import checked  # deferred import: it takes milliseconds in every recorded process

        with collector_paused():
            value = checked(getattr(import_module(self._sources[name], self.__name__), name))
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets each submodule as an attribute of its package, which would shadow a public name.
        if not (name in self._sources and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._sources})


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector during an import, which makes no garbage. The collector takes a sixth of the time
    that importing torch and transformers takes."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def make_lazy(package: str, sources: Mapping[str, str]) -> None:
    """Make a package import its public names on first use. `sources`: public name -> module that defines it."""
    module = sys.modules[package]
    vars(module)["_sources"] = sources
    module.__class__ = LazyPackage
