"""The frameworks by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ...schemas.errors import InvalidOption
from .framework import Framework
from .nemo_rl import NemoRl
from .openrlhf import OpenRlhf
from .prime_rl import PrimeRl
from .slime import Slime
from .trl import Trl
from .verl import Verl

FRAMEWORKS: dict[str, type[Framework]] = {
    framework.name: framework for framework in (Verl, Trl, Slime, NemoRl, PrimeRl, OpenRlhf)
}


def framework_of(name: str, options: dict[str, Any]) -> Framework:
    """A framework with those of its options that are given: not None, and of another framework's not False."""
    if name not in FRAMEWORKS:
        raise InvalidOption(f"like: got {name!r}; use {', '.join(FRAMEWORKS)}")
    given = {option: value for option, value in options.items() if value is not None}
    own = options_of(name)
    for option, value in given.items():
        if option not in own and value is not False:
            raise InvalidOption(f"{option}: {name} has no such option; {_whose(option)}")
    return FRAMEWORKS[name](**{option: value for option, value in given.items() if option in own})


def refuse_options(options: dict[str, Any]) -> None:
    """Raise InvalidOption for options of a framework where none is chosen."""
    for option, value in options.items():
        if value is not None and value is not False:
            raise InvalidOption(f"{option}: without a framework there is none; {_whose(option)}")


def options_of(name: str) -> tuple[str, ...]:
    """Names of a framework's options."""
    return tuple(field.name for field in fields(FRAMEWORKS[name]))  # type: ignore[arg-type]


def _whose(option: str) -> str:
    owners = [name for name in FRAMEWORKS if option in options_of(name)]
    return f"it belongs to {' and '.join(owners)}: leave it away, or ask --like {owners[0]}" if owners else "see --help"
