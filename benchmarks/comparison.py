"""Alternating measurements and their ratio."""

import statistics
import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure per round, with the bound that the project aims for."""

    what: str
    values: list[float]
    """One a round."""
    unit: str = ""
    """Empty for a ratio."""
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self):
        middle = statistics.median(self.values)
        spread = f"{min(self.values):.3g} to {max(self.values):.3g} in {len(self.values)} rounds"
        if self.at_most is not None:
            bound, met = f"at most {self.at_most:g}", middle <= self.at_most
        elif self.at_least is not None:
            bound, met = f"at least {self.at_least:g}", middle >= self.at_least
        else:
            return f"{self.what}: {middle:.3g}{self.unit} ({spread})"
        return f"{self.what}: {middle:.3g}{self.unit} ({spread}; wanted: {bound}{'' if met else ', MISSED'})"


def seconds(function, clock=time.perf_counter):
    """Return the seconds that a call takes, by the wall clock or another one."""
    start = clock()
    function()
    return clock() - start


def in_turn(rounds, *, clock=time.perf_counter, before=lambda: None, **functions):
    """Return the seconds of each function in each round, by name; the functions are called in turn. The order is
    reversed every round. `before` is called before each function and not timed.
    """
    taken = {name: [] for name in functions}
    for number in range(rounds):
        for name in list(functions)[:: 1 if number % 2 == 0 else -1]:
            before()
            taken[name].append(seconds(functions[name], clock))
    return taken


def ratios(above, below):
    """The ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]
