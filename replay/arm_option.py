"""The description of an arm's option, from which checks, messages, the command line and the docs follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ..schemas.errors import InvalidOption, option

HF, VLLM, EXACT = "hf", "vllm", "exact"
ENGINES = (HF, VLLM, EXACT)
GRADIENT, LOCATE, FACTORY = "gradient", "locate", "factory"
"""What else takes arms: `gradient`, `locate`, and a model of `--model-factory` that gives logits alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Values of another option that an option cannot be combined with."""

    other: str
    why: str
    values: tuple[str, ...] = ()
    """Values of the option itself; empty for all."""
    others: tuple[str, ...] = ()
    """Values of the other option, without what follows a colon; empty for all."""
    engine: str | None = None
    """The only engine that this concerns; None for all."""

    def meets(self, value: Any, other: Any) -> bool:
        """Whether these two values exclude each other."""
        words = (str(one).partition(":")[0] for one in (value, other))
        return all(not wanted or word in wanted for word, wanted in zip(words, (self.values, self.others), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOption:
    """What an option of `Arm` takes, who has it, and what it excludes."""

    help: str
    users: tuple[str, ...] = (HF, EXACT)
    """Engines that have it, and GRADIENT, LOCATE, FACTORY."""
    values: tuple[str, ...] = ()
    """All that it takes; empty for a number, a switch or any text. `word:N` takes a number from 1 on."""
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """User -> values that it does not have."""
    clashes: tuple[Clash, ...] = ()
    metavar: str | None = None
    least: int = 1
    """Lower bound of a whole number."""
    most: float | None = None
    """Upper bound of a number above 0 that need not be whole; None for a whole number."""
    label: str | None = None
    """Stands before the value in the name that is made for an arm; None for the option's name and a hyphen."""

    @property
    def takes_numbers(self) -> bool:
        """Whether some of its values end in a number of the user's choice."""
        return any(value.endswith(":N") for value in self.values)

    def works(self, user: str, value: Any) -> bool:
        """Whether an engine, or another user, has this value."""
        return user in self.users and value not in self.refused.get(user, ())

    def values_of(self, user: str) -> tuple[str, ...]:
        """The values that a user has."""
        return tuple(value for value in self.values if self.works(user, value))

    def check(self, name: str, value: Any) -> None:
        """Raise InvalidOption for a value that it does not take."""
        if isinstance(value, str) and self.values:
            word, colon, number = value.partition(":")
            counted = colon and number.isdecimal() and int(number) and f"{word}:N" in self.values
            if not counted and (colon or word not in self.values):
                raise InvalidOption(f"got {value!r}; use {', '.join(self.values)}", option=name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if self.most is None and value < self.least:
            raise InvalidOption(f"got {value}; use {self.least} or more", option=name)
        if self.most is not None and not 0 < value <= self.most:
            bound = "" if self.most == inf else f" and up to {self.most:g}"
            raise InvalidOption(f"got {value}; use a number above 0{bound}", option=name)

    def made_name(self, name: str, value: Any) -> str:
        """What a changed value adds to the name that is made for an arm."""
        label = f"{name.replace('_', '-')}-" if self.label is None else self.label
        return label + ("" if value is True else str(value).replace(":", "-"))


def arm_option(help: str, *, default: Any = None, **described: Any) -> Any:
    """A field of `Arm` with its description."""
    return field(default=default, metadata={"option": ArmOption(help=help, **described)})


def check_clashes(options: Mapping[str, ArmOption], values: Mapping[str, Any]) -> None:
    """Raise InvalidOption for two options that exclude each other."""
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
                    f"{'' if values[name] is True else values[name]} does not go with {phrase(clash.other, values[clash.other])}: "
                    f"{clash.why}; {f'use {use}' if use else 'drop one of them'}".lstrip(),
                    option=name,
                )


def phrase(name: str, value: Any) -> str:
    """An option with its value in a sentence: `batch-size 1`, `compile`."""
    return name.replace("_", "-") + ("" if value is True else f" {value}")
