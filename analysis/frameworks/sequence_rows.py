"""Keep per-sequence rows of a framework's numbers, read once, so that sequences can be left out without reading tokens
again.

The rows returned by the framework's token-reading macros are stored in temporary tables, which replace the macros.
Sequences that are left out are filtered from these tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from ..trace.connection import Connection
from ..trace.database import Database
from ..trace.source import Pair
from .framework import Framework, TokenMedians

KEYS = ("run", "step", "seq_id")

_BIN = """
CASE WHEN isnan({x}) THEN 2000000 WHEN {x} = 0 THEN 0
     ELSE sign({x}) * (1000000 + greatest(-700000, least(700000, floor(log2(abs({x})) * 512)))) END::INTEGER
"""
"""SQL for the bin number of a value, ascending with the value; bins are 1/512 octave wide. NaN sorts above all numbers,
as in DuckDB."""
_OF_NAN = 2_000_000


class SequenceRows:
    """Stored rows of a framework's token-reading macros, which replace these macros until `close` is called."""

    def __init__(self, database: Database, medians: TokenMedians | None):
        self._database, self._medians = database, medians
        self._parameters: dict[str, str] = {}

    def keep(self, macro: str, rows: pa.Table) -> None:
        """Replace a macro by one that returns the given rows."""
        self._make_table(f"kept_{macro}", rows)
        self._stand_in(macro, f"SELECT * FROM temp.kept_{macro}")

    def without_parts(self, parts: pa.Table) -> Iterator[None]:
        """Leave out one part of the sequences after the other; `parts` contains the sequence keys and the number of
        each sequence's `part`.

        Tokens are read once more if the numbers include medians over tokens.
        """
        kept, keys = list(self._parameters), ", ".join(KEYS)
        self._make_table("left_out", parts)
        num_parts = int(parts.column("part").to_numpy().max()) + 1
        if self._medians is not None:
            self.keep(self._medians.macro, self._medians_without(self._medians, num_parts))
        for part in range(num_parts):
            for macro in kept:
                of_part = f"(SELECT {keys} FROM temp.left_out WHERE part = {part})"
                self._stand_in(macro, f"SELECT * FROM temp.kept_{macro} ANTI JOIN {of_part} USING ({keys})")
            if self._medians is not None:
                rows = f"SELECT * EXCLUDE (part) FROM temp.kept_{self._medians.macro} WHERE part = {part}"
                self._stand_in(self._medians.macro, rows)
            yield

    def close(self) -> None:
        """Restore the original macros, which read tokens."""
        for macro in self._parameters:
            self._database.connection.execute(f"DROP MACRO TABLE temp.{macro}")
            self._database.connection.execute(f"DROP TABLE temp.kept_{macro}")
        self._parameters.clear()

    def _make_table(self, name: str, rows: pa.Table) -> None:
        connection = self._database.connection
        connection.register("given_rows", rows)
        try:
            connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT * FROM given_rows")
        finally:
            connection.unregister("given_rows")

    def _stand_in(self, macro: str, query: str) -> None:
        connection = self._database.connection
        if macro not in self._parameters:
            self._parameters[macro] = _parameters(connection, macro)
        connection.execute(f"CREATE OR REPLACE TEMP MACRO {macro}({self._parameters[macro]}) AS TABLE {query}")

    def _medians_without(self, medians: TokenMedians, num_parts: int) -> pa.Table:
        """Return the medians of each run with each part left out in turn, num_parts rows per run."""
        connection = self._database.connection
        runs = sorted(source.run for source in self._database.sources)
        found = {
            column: [
                value for run in runs for value in _lower_medians(connection, medians.tokens, of_tokens, run, num_parts)
            ]
            for column, of_tokens in medians.columns.items()
        }
        return pa.table(
            {
                "run": [run for run in runs for _ in range(num_parts)],
                "step": pa.nulls(len(runs) * num_parts, pa.int64()),
                "part": list(range(num_parts)) * len(runs),
                **{column: pa.array(values, pa.float64()) for column, values in found.items()},
            }
        )


@contextmanager
def read_once(database: Database, framework: Framework, pair: Pair) -> Iterator[SequenceRows]:
    """Read the rows that determine a framework's numbers for a pair of passes; inside the context, computing the
    numbers reads no tokens."""
    rows = SequenceRows(database, framework.token_medians(pair))
    try:
        for macro, table in framework.sequence_rows(database, pair):
            rows.keep(macro, table)
        yield rows
    finally:
        rows.close()


def _parameters(connection: Connection, macro: str) -> str:
    query = "SELECT parameters FROM duckdb_functions() WHERE function_name = ? AND function_type = 'table_macro'"
    ((parameters,),) = connection.raw.execute(query, [macro]).fetchall()
    return ", ".join(parameters)


def _lower_medians(connection: Connection, tokens: str, column: str, run: str, num_parts: int) -> list[float | None]:
    """Return the lower median of a run's token values with each part left out in turn, [num_parts]; NULL values are
    ignored.

    Tokens are read twice: counts in narrow bins first locate the medians, then only the values in those bins are
    collected.
    """
    within = f"{tokens} JOIN temp.left_out USING ({', '.join(KEYS)}) WHERE run = ? AND {column} IS NOT NULL"
    bin = _BIN.format(x=column)
    connection.use_threads()
    counted = connection.execute(
        f"SELECT part, {bin} AS bin, count(*) AS num_tokens FROM {within} GROUP BY ALL", [run]
    ).fetchnumpy()
    if not len(counted["bin"]):
        return [None] * num_parts
    bins_B, place_C = np.unique(counted["bin"], return_inverse=True)
    counts_PB = np.zeros((num_parts, len(bins_B)), np.int64)
    counts_PB[counted["part"], place_C] = counted["num_tokens"]
    left_PB = counts_PB.sum(axis=0) - counts_PB
    rank_P = (left_PB.sum(axis=1) - 1) // 2
    upto_PB = left_PB.cumsum(axis=1)
    bin_P = (upto_PB <= rank_P[:, None]).sum(axis=1)
    has_nan_P = left_PB[:, bins_B == _OF_NAN].sum(axis=1) > 0
    wanted = sorted({int(bins_B[place]) for part, place in enumerate(bin_P) if rank_P[part] >= 0})
    gathered = connection.execute(
        f"SELECT part, {bin} AS bin, {column} AS value FROM {within} AND bin IN ({', '.join(map(str, wanted))})", [run]
    ).fetchnumpy()
    found: list[float | None] = []
    for part in range(num_parts):
        if rank_P[part] < 0:
            found.append(None)
        elif has_nan_P[part]:
            found.append(math.nan)
        else:
            place = bin_P[part]
            values = gathered["value"][(gathered["bin"] == bins_B[place]) & (gathered["part"] != part)]
            rank = rank_P[part] - (upto_PB[part, place - 1] if place else 0)
            found.append(float(np.partition(values, rank)[rank]))
    return found
