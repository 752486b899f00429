"""Keep per-sequence rows of a framework's numbers, read once, so that sequences can be left out without reading tokens
again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..trace.database import Database
from ..trace.source import Pair
from .framework import Framework


@contextmanager
def read_once(database: Database, framework: Framework, pair: Pair) -> Iterator[None]:
    """Read the rows that determine a framework's numbers for a pair of passes; inside the context, computing the
    numbers reads no tokens, except for medians over tokens.

    The rows returned by the framework's token-reading macros are stored in temporary tables, which replace the macros.
    Sequences that `database.leave_out` excludes are filtered from these tables.
    """
    connection, kept = database.connection, list[str]()
    try:
        for macro, rows in framework.sequence_rows(database, pair):
            query = (
                "SELECT parameters FROM duckdb_functions() WHERE function_name = ? AND function_type = 'table_macro'"
            )
            ((parameters,),) = connection.raw.execute(query, [macro]).fetchall()
            connection.register("given_rows", rows)
            connection.execute(f"CREATE OR REPLACE TEMP TABLE kept_{macro} AS SELECT * FROM given_rows")
            connection.unregister("given_rows")
            connection.execute(
                f"CREATE OR REPLACE TEMP MACRO {macro}({', '.join(parameters)}) AS TABLE "
                f"SELECT * FROM temp.kept_{macro} ANTI JOIN left_out USING (run, step, seq_id)"
            )
            kept.append(macro)
        yield
    finally:
        for macro in kept:
            connection.execute(f"DROP MACRO TABLE temp.{macro}")
            connection.execute(f"DROP TABLE temp.kept_{macro}")
