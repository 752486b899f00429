from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ...schemas.errors import InvalidOption
from ..trace.macros import quoted, quoted_pair

if TYPE_CHECKING:
    import pyarrow as pa

    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair

Default = TypeVar("Default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework's options, under the framework's own names, and the metrics that it logs with these options.

    Subclasses are frozen dataclasses whose fields are the options, declared with `option_field`.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    """Release of the framework whose metric definitions are reproduced."""
    source: ClassVar[str]
    """The framework's source files that contain these definitions."""
    columns: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for option in fields(self):
            value, at_least = getattr(self, option.name), option.metadata["at_least"]
            if value is None:
                continue
            choices = option.metadata["choices"]
            if choices and value not in choices:
                raise InvalidOption(f"got {value!r}; {self.name} has {', '.join(choices)}", option=option.name)
            if at_least is not None and not value >= at_least:
                raise InvalidOption(f"got {value:g}; pass {at_least:g} or more", option=option.name)
        self.check()

    def check(self) -> None:
        """Raise InvalidOption if the options contradict each other."""

    def numbers(self, database: Database, pair: Pair, by: str, only: Sequence[str] = ()) -> Rows:
        """Return one row per run or per step. Pass a is the trainer, pass b the rollout.

        `only` selects columns of the macro `<name>_<by>s`. If it is empty, all columns are returned.
        """
        columns = ", ".join(f'"{name}"' for name in only) or "*"
        options = "".join(f", {name} := {literal(value)}" for name, value in asdict(self).items())
        macro = f"{self.name.replace('-', '_')}_{by}s"
        rows = database.ask(f"SELECT {columns} FROM {macro}({quoted_pair(pair)}{options})")
        return rows.without({name for name in rows.columns if self.is_unlogged(name)})

    def is_unlogged(self, column: str) -> bool:
        return False

    def row_calls(self, pair: Pair) -> Iterable[str]:
        """Return the macro calls that read tokens. Every metric can be computed from the rows that these calls return.

        The rows include the columns run, step and seq_id. A macro may read the rows of earlier macros.
        """
        return ()

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        for call in self.row_calls(pair):
            database.connection.use_threads()
            query = f"SELECT * FROM {call} ORDER BY ALL"
            yield call.split("(")[0], database.connection.sql(query).to_arrow_table()

    def notes(self, database: Database, pair: Pair) -> list[str]:
        """Return caveats on the metrics for the open traces, one sentence each."""
        return []


def option_field(
    default: Default, help: str, *, metavar: str | None = None, choices: tuple[str, ...] = (), at_least: float | None = None
) -> Default:  # fmt: skip
    metadata = {"help": help, "metavar": metavar or "|".join(choices) or None, "choices": choices, "at_least": at_least}
    return field(default=default, metadata=metadata)


def literals(values: Iterable[object]) -> str:
    return ", ".join(literal(value) for value in values)


def literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{literals(value)}]"
    return quoted(value) if isinstance(value, str) else f"{value!r}::DOUBLE"


@contextmanager
def read_once(database: Database, framework: Framework, pair: Pair) -> Iterator[None]:
    """Read a pair's tokens once, instead of once per metric. Medians over tokens still need a second read.

    Inside the context, macros that otherwise read tokens return rows from temporary tables, without the sequences that
    `database.leave_out` excludes.
    """
    connection, kept = database.connection, list[str]()
    try:
        for macro, rows in framework.sequence_rows(database, pair):
            query = (
                "SELECT parameters FROM duckdb_functions() WHERE function_name = ? AND function_type = 'table_macro'"
            )
            ((parameters,),) = connection.raw.execute(query, [macro]).fetchall()
            with connection.registered("given_rows", rows):
                connection.execute(f"CREATE OR REPLACE TEMP TABLE kept_{macro} AS SELECT * FROM given_rows")
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
