"""The one reader of tokens: sequences joined with their scores under some passes, as batches of rows or of flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from .quoting import quoted
from .ragged import Tokens, tokens_of

_LISTS = {"mask": "response_mask", "advantages": "advantages"}
_EMPTY = {"mask": "[]::BOOLEAN[]", "advantages": "[]::FLOAT[]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """Rows of scores that are read beside a sequence."""

    name: str
    iteration: int | None = 0
    """None: every inner iteration, a row each."""
    scored: bool = True
    """Whether the row needs logprobs; else the list may be empty."""
    optional: bool = False
    """Whether a sequence without such a row is read, too; its list is empty then."""
    logprobs: bool = True
    """Whether the logprobs themselves are read."""


def token_query(
    passes: Mapping[str, PassRows], rows: Sequence[str], *, run: str | None = None, steps: Sequence[int] | None = None,
    keys: str = "", lists: Sequence[str] = (), entropy: Sequence[str] = (), of_sequences: bool = False, where: str = "",
    order: str = "",
) -> str:  # fmt: skip
    """SQL of one row a sequence; `tokens_of_rows` reads its lists.

    It has the logprobs of every pass under the pass's key in `passes`; `rows`, which are expressions over `s`, the
    sequence, and the keys of passes; the `lists` mask and advantages, and the advantage; and the `entropy` of the first of
    these passes that has one.

    Only sequences with a row of every pass that is not optional are read, of one run and some steps: a range is taken as a
    whole. The table of sequences itself is read only where a list of it is asked for, or with `of_sequences`: its keys
    cost a third of the time. `keys` is a condition on step and seq_id of every table, `where` one on the joined row.
    """
    within = _within(run, steps, keys)
    columns = [*rows, *(_list(name, scored) for name, scored in passes.items() if scored.logprobs)]
    if entropy:
        columns.append(f"coalesce({', '.join(f'{name}.entropy' for name in entropy)}, []::FLOAT[]) AS entropy")
    columns += [
        "s.advantage" if name == "advantage" else f"coalesce(s.{_LISTS[name]}, {_EMPTY[name]}) AS {name}"
        for name in lists
    ]
    tables = [
        (name, f"(SELECT * FROM scores WHERE {within}{_of(scored)})", scored.optional)
        for name, scored in passes.items()
    ]
    if of_sequences or lists:
        tables.insert(0, ("s", f"(SELECT * FROM sequences WHERE {within})", False))
    (base, table, _), *others = sorted(tables, key=lambda entry: entry[2])
    joins = [f"{table} AS {base}"]
    for name, other, optional in others:
        on = " AND ".join(
            f"{name}.{key} = {base}.{key}" for key in (("step", "seq_id") if run else ("run", "step", "seq_id"))
        )
        joins.append(f"{'LEFT JOIN' if optional else 'JOIN'} {other} AS {name} ON {on}")
    kept = f" WHERE {where}" if where else ""
    return f"SELECT {', '.join(columns)} FROM {' '.join(joins)}{kept}{f' ORDER BY {order}' if order else ''}"


def tokens_of_rows(rows: pa.RecordBatch | pa.Table, passes: Sequence[str], *, optional: Sequence[str] = ()) -> Tokens:
    """Tokens of rows of `token_query`; those of `passes` are needed, `optional` ones not."""
    names = rows.schema.names

    def column(name: str) -> object:
        return rows.column(name) if name in names else None

    return tokens_of(
        {name: rows.column(name) for name in (*passes, *optional)}, optional=optional, mask=column("mask"),
        entropy=column("entropy"), advantage=column("advantage"), advantages=column("advantages"),
    )  # fmt: skip


def _list(name: str, scored: PassRows) -> str:
    is_given = scored.scored and not scored.optional
    return f"{name}.logprobs AS {name}" if is_given else f"coalesce({name}.logprobs, []::FLOAT[]) AS {name}"


def _of(scored: PassRows) -> str:
    iteration = "" if scored.iteration is None else f" AND iteration = {scored.iteration}"
    given = " AND logprobs IS NOT NULL" if scored.scored else ""
    return f' AND "pass" = {quoted(scored.name)}{iteration}{given}'


def _within(run: str | None, steps: Sequence[int] | None, keys: str) -> str:
    terms = [] if run is None else [f"run = {quoted(run)}"]
    if isinstance(steps, range):
        terms.append(f"step BETWEEN {steps.start} AND {steps.stop - 1}")
    elif steps is not None:
        terms.append(f"step IN ({', '.join(str(step) for step in steps)})" if len(steps) else "false")
    return " AND ".join([*terms, keys] if keys else terms) or "true"
