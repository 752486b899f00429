"""Packages that import their public names when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package whose public names are functions and classes of other modules, each imported at its first use.

    A public name stays what it is when a module of the same name is imported beside it: `analysis.check` is the function,
    whatever was imported before. Its module is reached by import alone (`from tim_trace.analysis.check import thresholds`).
    """

    _sources: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._sources:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from .arguments import checked  # takes milliseconds, and every process that is recorded imports tim_trace

        value = checked(getattr(import_module(self._sources[name], self.__name__), name))
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds every module to its package: it would hide the public name.
        if not (name in self._sources and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._sources})


def make_lazy(package: str, sources: Mapping[str, str]) -> None:
    """Let a package import these names when they are asked for: public name -> the module that defines it."""
    module = sys.modules[package]
    vars(module)["_sources"] = sources
    module.__class__ = LazyPackage
