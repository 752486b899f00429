from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..trace.macros import quoted_pair
from .framework import Framework
from .notes import in_half

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from ..trace.database import Database
    from ..trace.source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Verl(Framework):
    name: ClassVar[str] = "verl"
    version: ClassVar[str] = "0.9.0"
    source: ClassVar[str] = "verl/trainer/ppo/rollout_corr_helper.py, verl/utils/debug/metrics.py"

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        import pyarrow as pa

        from .verl_sums import summed

        # Sum here rather than in a function that DuckDB calls, so that summing overlaps with reading.
        batches = database.connection.mapped_batches(f"SELECT * FROM verl_rows({quoted_pair(pair)})", summed)
        yield "verl_summed", pa.Table.from_batches(list(batches))

    def notes(self, database: Database, pair: Pair) -> list[str]:
        return in_half(database, pair[0], "verl")


FRAMEWORK = Verl


def register(connection: duckdb.DuckDBPyConnection) -> None:
    """Register `verl_sums(old FLOAT[], rollout FLOAT[], mask BOOLEAN[])` on a connection.

    With an empty mask, every token is included. A token that lacks a logprob in either list is left out of all sums.
    """
    from .verl_sums import STRUCT, verl_sums

    connection.create_function("verl_sums", verl_sums, ["FLOAT[]", "FLOAT[]", "BOOLEAN[]"], STRUCT, type="arrow")
