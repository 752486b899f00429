"""Readings of all tokens in parts: one after the other here, or by the actors of a Ray cluster."""

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

CPUS = 4
"""That an actor takes: readings are done by threads, and each actor opens the trace once."""

UNITS = 64
"""Into which a reading is divided that is not large: actors that are done early find others left."""


def spread(
    database: Database, function: Callable[[Database, Unit], Iterable[Made]], units: Sequence[Unit]
) -> Iterator[Made]:
    """What a function of the database and each unit gives, in the order of the units.

    It is computed when it is asked for; on a cluster (`database.ray`), where there is one, in any order, by actors that open the
    traces for themselves. The function is one of a module, and what it takes and gives goes through pickle.

    Raises InvalidOption where a trace is being recorded: actors would not see the same rows. Else what `run_units` raises.
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
    """Tokens of a unit: as many as are read at once here, and fewer on a cluster, so that each of its actors has some."""
    return most if database.ray is None else max(min(most, num_tokens // UNITS), 1)


def places(database: Database) -> tuple[str, ...]:
    """Where actors find the traces. Raises InvalidOption where one is being recorded."""
    for source in database.sources:
        if source.is_live or source.journals:
            raise InvalidOption(
                f"{source.store.url} is being recorded, or was not finished, and the nodes would not see the same rows of it; ask "
                "without a cluster",
                option="ray",
            )
    return tuple(
        os.path.abspath(source.store.root) if source.store.is_local else source.store.url for source in database.sources
    )


class _Reader(Generic[Unit, Made]):
    """What an actor does: it opens the traces once."""

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
        """Nothing was written."""
