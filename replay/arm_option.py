"""Arm option definitions. Checks, messages, command-line flags and docs are generated from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ..schemas.errors import InvalidOption, option

HF, VLLM, EXACT = "hf", "vllm", "exact"
ENGINES = (HF, VLLM, EXACT)
GRADIENT, LOCATE, FACTORY = "gradient", "locate", "factory"
"""Users of arm options other than engines: two commands, and factory models that return only logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    other: str
    why: str
    values: tuple[str, ...] = ()
    """Values of this option that conflict with `other`. Empty if all of them do."""
    others: tuple[str, ...] = ()
    """Values of `other` that conflict with this option (`chunked` for `chunked:N`). Empty if all of them do."""
    engine: str | None = None

    def meets(self, value: Any, other: Any) -> bool:
        words = (str(one).partition(":")[0] for one in (value, other))
        return all(not wanted or word in wanted for word, wanted in zip(words, (self.values, self.others), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOption:
    help: str
    users: tuple[str, ...] = (HF, EXACT)
    """Engines, commands and model factories that support the option."""
    values: tuple[str, ...] = ()
    """Allowed values. Empty for numbers, switches and free text. In `word:N`, N is an integer of at least 1."""
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Unsupported values, by engine or command."""
    clashes: tuple[Clash, ...] = ()
    metavar: str | None = None
    least: int = 1
    """Minimum for an integer option."""
    most: float | None = None
    """Maximum for a float option, whose value must also be above 0. None for an integer option."""
    label: str | None = None
    """Prefix for generated arm names. None means the option's name followed by a hyphen."""

    @property
    def takes_numbers(self) -> bool:
        return any(value.endswith(":N") for value in self.values)

    def works(self, user: str, value: Any) -> bool:
        return user in self.users and value not in self.refused.get(user, ())

    def values_of(self, user: str) -> tuple[str, ...]:
        return tuple(value for value in self.values if self.works(user, value))

    def check(self, name: str, value: Any) -> None:
        if self.values and value is not None:
            word, colon, number = str(value).partition(":")
            counted = colon and number.isdecimal() and number[0] != "0" and f"{word}:N" in self.values
            if not counted and (colon or word not in self.values):
                raise InvalidOption(f"got {value!r}; use {', '.join(self.values)}", option=name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if self.most is None and value < self.least:
            raise InvalidOption(f"got {value}; pass {self.least} or more", option=name)
        if self.most is not None and not 0 < value <= self.most:
            bound = "" if self.most == inf else f" and up to {self.most:g}"
            raise InvalidOption(f"got {value}; pass a number above 0{bound}", option=name)

    def made_name(self, name: str, value: Any) -> str:
        label = f"{name.replace('_', '-')}-" if self.label is None else self.label
        return label + ("" if value is True else str(value).replace(":", "-").replace("/", "-"))


def arm_option(help: str, *, default: Any = None, **described: Any) -> Any:
    return field(default=default, metadata={"option": ArmOption(help=help, **described)})


def check_clashes(options: Mapping[str, ArmOption], values: Mapping[str, Any]) -> None:
    for name, described in options.items():
        for clash in described.clashes if values[name] else ():
            if (
                values[clash.other]
                and clash.engine in (None, values["engine"])
                and clash.meets(values[name], values[clash.other])
            ):
                fitting = [value for value in options[clash.other].values if not clash.meets(values[name], value)]
                use = ", ".join([option(clash.other, fitting[0]), *fitting[1:]]) if fitting else ""
                raise InvalidOption(
                    f"{'' if values[name] is True else values[name]} cannot be combined with "
                    f"{phrase(clash.other, values[clash.other])}: "
                    f"{clash.why}; {f'use {use}' if use else 'drop one of them'}".lstrip(),
                    option=name,
                )


def phrase(name: str, value: Any) -> str:
    return name.replace("_", "-") + ("" if value is True else f" {value}")
