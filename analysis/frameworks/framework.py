"""What every framework's numbers are asked through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ...schemas.errors import InvalidOption
from ..trace.connection import quoted, quoted_pair

if TYPE_CHECKING:
    import pyarrow as pa

    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework's options, under its own names, and the numbers that it logs with these.

    A framework is a frozen dataclass that inherits this one; a field is an option, and an `option_field` has its help on the
    command line and its range.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    """The release whose definitions these are."""
    source: ClassVar[str]
    """Where it defines them."""
    columns: ClassVar[str] = ""
    """SQL that stands for {columns} in the macros."""

    def __post_init__(self) -> None:
        for option, value in ((option, getattr(self, option.name)) for option in fields(self)):
            choices, at_least = option.metadata.get("choices", ()), option.metadata.get("at_least")
            if value is not None and choices and value not in choices:
                raise InvalidOption(f"got {value!r}; {self.name} has {', '.join(choices)}", option=option.name)
            if value is not None and at_least is not None and not value >= at_least:
                raise InvalidOption(f"got {value:g}; give {at_least:g} or more", option=option.name)
        self.check()

    def check(self) -> None:
        """Raise InvalidOption for options that do not go together."""

    def numbers(self, database: Database, pair: Pair, by: str, only: Sequence[str] = ()) -> Rows:
        """A row per run or step; by is `run` or `step`, pass a of the pair the trainer, b the rollout.

        `only` names the numbers to compute, of those of the macro `<name>_<by>s`, where not all are asked for.
        """
        rows = database.ask(call(self.name.replace("-", "_"), pair, by, only, **options_of(self)))
        return rows.without({name for name in rows.columns if self.is_unlogged(name)})

    def is_unlogged(self, column: str) -> bool:
        """Whether the framework logs no such number with these options."""
        return False

    def row_calls(self, pair: Pair) -> Iterable[str]:
        """Calls of the macros that read tokens: their rows are all that the numbers need, each naming its run, step and seq_id.

        Options of other kinds may make the numbers read tokens again. A macro may be made of those that come before it.
        """
        return ()

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        """Macro -> the rows that its call gives, in one order whatever the threads."""
        for call in self.row_calls(pair):
            database.connection.use_threads()
            query = f"SELECT * FROM {call} ORDER BY ALL"
            yield call.split("(")[0], database.connection.sql(query).to_arrow_table()

    def token_medians(self, pair: Pair) -> TokenMedians | None:
        """Medians over all tokens among the numbers; None without any."""
        return None

    def notes(self, database: Database, pair: Pair) -> list[str]:
        """What a reader of these numbers in these traces should know, a sentence each."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMedians:
    """Medians over all tokens, which follow from no sums."""

    macro: str
    """It gives them: run, step, and a column each."""
    tokens: str
    """The call of a macro that gives the values: a row per token, which names its run, step and seq_id."""
    columns: Mapping[str, str]
    """Column of the medians -> column of the tokens."""


def option_field(
    default: Any, help: str, *, metavar: str | None = None, choices: tuple[str, ...] = (), at_least: float | None = None
) -> Any:
    """A field of a framework's dataclass, with the help of its option, the name of its value, and the values it may take."""
    metadata = {"help": help, "metavar": metavar or "|".join(choices) or None, "choices": choices, "at_least": at_least}
    return field(default=default, metadata=metadata)


def call(macro: str, pair: Pair, by: str, only: Sequence[str] = (), **options: Any) -> str:
    """A query of one of the macros `<macro>_steps` and `<macro>_runs`, for all of its columns or some."""
    columns = ", ".join(f'"{name}"' for name in only) or "*"
    arguments = "".join(f", {name} := {literal(value)}" for name, value in options.items())
    return f"SELECT {columns} FROM {macro}_{by}s({quoted_pair(pair)}{arguments})"


def options_of(framework: Framework) -> dict[str, Any]:
    """Option -> value."""
    return {field.name: getattr(framework, field.name) for field in fields(framework)}


def literals(values: Iterable[Any]) -> str:
    """Values as arguments of a macro."""
    return ", ".join(literal(value) for value in values)


def literal(value: Any) -> str:
    """A value in SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{literals(value)}]"
    return quoted(value) if isinstance(value, str) else f"{value!r}::DOUBLE"
