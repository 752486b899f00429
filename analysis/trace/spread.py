"""Divide the reading of all tokens into units, which are read by this process or by the actors of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from ...schemas.errors import InvalidOption
from ...tracer.cluster import run_units
from .connection import limit_threads
from .database import Database
from .macros import Catalogue

Unit = TypeVar("Unit")
Made = TypeVar("Made")
Item = TypeVar("Item")

CPUS = 4
"""CPUs per actor: several, because reading is multithreaded and each actor has to open the traces."""

UNITS = 64
"""Minimum number of units per reading on a cluster, so that actors that finish early get more work."""


def spread(
    database: Database, function: Callable[[Database, Unit], Iterable[Made]], units: Sequence[Unit]
) -> Iterator[Made]:
    """Yield the results of `function(database, unit)` in the order of the units.

    Results are computed on request. On a cluster (`database.ray`), actors that open the traces themselves work through
    the units in any order. The function must be defined in a module; its arguments and results must be picklable.

    Raises InvalidOption if a trace is being recorded (actors would see other rows), and any error of `run_units`.
    """
    if database.ray is None:
        return (made for unit in units for made in function(database, unit))
    return _in_order(database.ray, _Reader(places(database), database.steps, database.catalogue, function), units)


def _in_order(address: str, reader: _Reader[Unit, Made], units: Sequence[Unit]) -> Iterator[Made]:
    if not units:
        return
    ended: dict[int, list[Made]] = {}
    wanted = 0
    for number, made in run_units(address, reader, units, num_cpus=CPUS, num_gpus=0):
        ended[number] = made
        while wanted in ended:
            yield from ended.pop(wanted)
            wanted += 1


def unit_tokens(database: Database, most: int, num_tokens: int) -> int:
    """Return the number of tokens per unit: `most` here, fewer on a cluster, so that every actor gets work."""
    return most if database.ray is None else max(min(most, num_tokens // UNITS), 1)


def packed(items: Iterable[Item], size: Callable[[Item], Sequence[int]], most: Sequence[int]) -> Iterator[list[Item]]:
    """Yield lists of neighbouring items whose sizes add up to at most `most`; a larger item has a list of its own.

    >>> list(packed([1, 2, 5, 1], lambda item: (item,), (4,)))
    [[1, 2], [5], [1]]
    """
    batch: list[Item] = []
    total: Sequence[int] = ()
    for item in items:
        own = size(item)
        total = [a + b for a, b in zip(total, own, strict=True)] if batch else own
        if batch and any(used > limit for used, limit in zip(total, most, strict=True)):
            yield batch
            batch, total = [], own
        batch.append(item)
    if batch:
        yield batch


def places(database: Database) -> tuple[str, ...]:
    """Return the locations at which actors open the traces. Raises InvalidOption if a trace is being recorded."""
    for source in database.sources:
        if source.is_live or source.journals:
            raise InvalidOption(
                f"{source.store.url} is being recorded or was not finished, so not all nodes would see the same rows; "
                f"run the command without a cluster",
                option="ray",
            )
    return tuple(
        os.path.abspath(source.store.root) if source.store.is_local else source.store.url for source in database.sources
    )


class _Reader(Generic[Unit, Made]):
    """An actor's state: the traces, which it opens once."""

    def __init__(
        self, traces: tuple[str, ...], steps: str, catalogue: Callable[[], Catalogue[Database]],
        function: Callable[[Database, Unit], Iterable[Made]],
    ):  # fmt: skip
        self._traces, self._steps, self._catalogue, self._function = traces, steps, catalogue, function
        self._database: Database | None = None

    def run(self, unit: Unit) -> list[Made]:
        if self._database is None:
            limit_threads(CPUS)
            self._database = Database(self._traces, self._steps, catalogue=self._catalogue)
        return list(self._function(self._database, unit))

    def close(self) -> None:
        """Do nothing: a reader writes nothing."""
