from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import duckdb

from ..schemas.steps import ALL_STEPS
from . import correction, routing
from .distributions import function
from .frameworks import registry
from .trace.database import Database, core_files
from .trace.macros import LISTING, Catalogue, MacroFile
from .trace.source import Source, Traces


@cache
def catalogue() -> Catalogue[Database]:
    return Catalogue(
        [
            *core_files(), correction.MACROS, function.MACROS, routing.MACROS,
            MacroFile(name="changes", functions=("changes",), define=_define_changes),
            MacroFile(name="located", functions=("operators", "patches"), define=_define_located),
            *registry.macro_files(),
        ]
    )  # fmt: skip


def open_database(
    traces: Traces | Source | Sequence[Source] | Database, steps: str = ALL_STEPS, ray: str | None = None
) -> Database:
    """Open traces as a database with the given steps. If `traces` is already a database with these steps on this Ray
    cluster, return it unchanged.

    Raises TraceNotFound, NewerTrace, DamagedTrace, and InvalidOption if a trace has none of the steps.
    """
    if isinstance(traces, Database) and steps in (ALL_STEPS, traces.steps) and ray in (None, traces.ray):
        return traces
    return Database(traces, steps, ray=ray, catalogue=catalogue)


def connect(traces: Traces, *, like: Collection[str] = ()) -> duckdb.DuckDBPyConnection:
    """Open one or more traces for SQL.

    Views: `sequences`, `scores`, `passes`, `metrics`, `steps`, `tokens`, `changes`, and `operators` and `patches`
    (results of `locate`). Table macros, with d = logprob(a) - logprob(b) in nats:

    - `pair(a, b)`, `pair_sequences(a, b)`, `pair_steps(a, b)` and `pair_runs(a, b)`;
    - `pair_distributions(a, b)`, one row per response token whose distribution both passes captured, and its summaries
      `pair_distribution_sequences(a, b)`, `pair_distribution_steps(a, b)` and `pair_distribution_runs(a, b)`;
    - `pair_routing(a, b)` and related macros, if router choices were recorded.

    All views and macros have a `run` column. `like` adds the macros of frameworks, such as `verl_runs(a, b)`. If a
    trace is still being written, the connection shows the rows recorded so far.

    Raises InvalidOption for an unknown framework, TraceNotFound, NewerTrace or DamagedTrace.
    """
    for name in like:
        registry.check_name(name)
    database = open_database(traces)
    database.define_named(LISTING | {f"{name.replace('-', '_')}_runs" for name in like})
    if database.views.large is not None:  # the caller's queries may need any file
        database.views.large.choose_all()
    return database.connection.raw


def _define_changes(database: Database) -> None:
    from .facts.recorded import changes_table

    database.connection.register("changes", changes_table(database))


def _define_located(database: Database) -> None:
    from .location import view_rows

    for name, rows in view_rows(database).items():
        database.connection.register(name, rows)
