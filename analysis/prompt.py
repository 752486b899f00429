"""The interactive side of `tim-trace sql`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from ..schemas.errors import InvalidQuery
from .query import Session
from .rows import Rows, printable_lines

GREETING = (
    "views: sequences scores passes metrics steps tokens; macros: pair pair_sequences pair_steps pair_runs\n"
    "end a query with ; and the session with Ctrl-D"
)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Tell traces from the query: the last argument is one when it is no folder and no URL."""
    last = arguments[-1]
    is_query = (
        not os.path.exists(last) and "://" not in last.split(maxsplit=1)[0] and (len(arguments) > 1 or " " in last)
    )
    return (list(arguments[:-1]), last) if is_query else (list(arguments), None)


def prompt(session: Session, show: Callable[[Rows], None]) -> None:
    """Ask for queries until the input ends; a wrong one is explained and the next one asked for."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    print(GREETING, file=sys.stderr)
    while (query := _read()) is not None:
        if not query.strip(" ;\n"):
            continue
        try:
            show(session.ask(query))
        except InvalidQuery as error:
            print(printable_lines(str(error)), file=sys.stderr)


def _read() -> str | None:
    """Read lines up to one that ends with a semicolon; None at the end of the input."""
    lines: list[str] = []
    while not lines or not lines[-1].rstrip().endswith(";"):
        try:
            lines.append(input("tim-trace> " if not lines else "       ... "))
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            lines = []
    return "\n".join(lines)
