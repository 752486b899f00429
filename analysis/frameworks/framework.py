"""What every framework's numbers are asked through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...schemas.errors import InvalidOption
from ..trace.quoting import quoted, quoted_pair

if TYPE_CHECKING:
    import pyarrow as pa

    from ..rows import Rows
    from ..trace.database import Database
    from ..trace.source import Pair


class Framework(Protocol):
    """A framework's options, under its own names, and the numbers that it logs with these.

    Implementations are frozen dataclasses; a field is an option, and an `option_field` says its help on the command line.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    """The release whose definitions these are."""
    source: ClassVar[str]
    """Where it defines them."""

    def numbers(self, database: Database, pair: Pair, by: str) -> Rows:
        """A row a run or step; by is `run` or `step`, pass a of the pair the trainer, b the rollout."""

    def sequence_rows(self, database: Database, pair: Pair) -> Iterator[tuple[str, pa.Table]]:
        """Macro -> the rows that the numbers need of it, each naming its run, step and seq_id.

        With these in the place of the macros the numbers by run and step read no token, but for `token_medians`; what
        options of other kinds ask for may. A macro may be made of those that come before it.
        """

    def token_medians(self, pair: Pair) -> TokenMedians | None:
        """Medians over all tokens among the numbers; None where there are none."""

    def notes(self, database: Database, pair: Pair) -> list[str]:
        """What a reader of these numbers should know, a sentence each; what is not so in these traces is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMedians:
    """Medians over all tokens, which follow from no sums."""

    macro: str
    """It gives them: run, step, and a column each."""
    tokens: str
    """The call of a macro that gives the values: a row a token, which names its run, step and seq_id."""
    columns: Mapping[str, str]
    """Column of the medians -> column of the tokens."""


def option_field(default: Any, help: str, *, metavar: str | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of a framework's dataclass whose option has a help, and a name or choices for its value."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "choices": choices})


def call(macro: str, pair: Pair, by: str, **options: Any) -> str:
    """A query of one of the macros `<macro>_steps` and `<macro>_runs`."""
    arguments = "".join(f", {name} := {literal(value)}" for name, value in options.items())
    return f"SELECT * FROM {macro}_{by}s({quoted_pair(pair)}{arguments})"


def rows_of(database: Database, calls: Iterable[str]) -> Iterator[tuple[str, pa.Table]]:
    """Each macro with the rows that this call of it gives, in one order whatever the threads; later ones may use earlier ones."""
    for call in calls:
        database.connection.use_threads()
        query = f"SELECT * FROM {call} ORDER BY ALL"
        yield call.split("(")[0], database.connection.sql(query).to_arrow_table()


def options_of(framework: Framework) -> dict[str, Any]:
    """Option -> value."""
    return {field.name: getattr(framework, field.name) for field in fields(framework)}  # type: ignore[arg-type]


def check_choice(framework: str, option: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raise InvalidOption for a value that is none of the choices; None is one."""
    if value is not None and value not in choices:
        raise InvalidOption(f"got {value!r}; {framework} has {', '.join(choices)}", option=option)


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
        return f"[{', '.join(literal(each) for each in value)}]"
    return quoted(value) if isinstance(value, str) else f"{value!r}::DOUBLE"
