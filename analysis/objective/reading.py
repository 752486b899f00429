"""The tokens of a trace, read once: sequences with their logprobs under each pass, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ..statistics.intervals import unit
from ..trace.database import Database, quoted
from .pass_roles import PassRoles

BATCH_ROWS = 1024
"""Sequences that are handed to a thread at once."""

CHUNK_TOKENS = 32 << 20
"""Tokens that are joined at once."""

CHUNK_STEPS = 1024
"""Steps that are joined at once."""


def read_batches(database: Database, sides: PassRoles) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of sequences with the number of the range of steps that they are from; a step is in one range alone.

    They are all that went through the loss, also those without a token or without logprobs: see `is_whole`.
    """
    database.connection.execute("RESET threads")
    for number, steps in enumerate(_ranges(database)):
        for batch in database.connection.sql(_query(sides, *steps)).to_arrow_reader(BATCH_ROWS):
            yield number, batch


def _ranges(database: Database) -> list[tuple[int, int]]:
    """First and last step of parts of the trace that fit in memory; a larger step is one alone."""
    query = "SELECT step, sum(num_response_tokens)::BIGINT FROM sequences GROUP BY step ORDER BY step"
    ranges: list[tuple[int, int]] = []
    tokens = steps = 0
    for step, num_tokens in database.connection.execute(query).fetchall():
        if ranges and tokens + num_tokens <= CHUNK_TOKENS and steps < CHUNK_STEPS:
            ranges[-1] = (ranges[-1][0], step)
            tokens, steps = tokens + num_tokens, steps + 1
        else:
            ranges.append((step, step))
            tokens, steps = num_tokens, 1
    return ranges


def _query(sides: PassRoles, first_step: int, last_step: int) -> str:
    """One row a sequence and inner iteration that the loss's pass has a row of.

    `sequence`, `unit`, its group, and `micro_batch` are numbers, since names take long. `is_whole`: whether every pass gave as
    many logprobs as the response has tokens, of which there is one at least.
    """
    within = f"step BETWEEN {first_step} AND {last_step}"
    now = "train" if sides.current == sides.train else "now"
    joins = [_joined("JOIN", now, sides.current, within, first=False)]
    if sides.current != sides.train:
        joins.append(_joined("LEFT JOIN", "train", sides.train, within, first=True))
    if sides.rollout != sides.train:
        joins.append(_joined("LEFT JOIN", "rollout", sides.rollout, within, first=True))
    names = ["train", *(["rollout"] if sides.rollout != sides.train else []), *(["now"] if now == "now" else [])]
    columns = [f"{name}.logprobs AS {name}" for name in names]
    lengths = " AND ".join(f"coalesce(len({name}.logprobs) = s.num_response_tokens, false)" for name in names)
    return f"""
        SELECT s.step, {now}.iteration, hash(s.seq_id) AS sequence, {unit("s")} AS unit, s.num_response_tokens,
               CASE WHEN {now}.forward_id IS NULL THEN 0::UBIGINT ELSE hash({now}.writer, {now}.forward_id) END AS micro_batch,
               s.num_response_tokens > 0 AND {lengths} AS is_whole,
               s.advantage, coalesce(s.advantages, []::FLOAT[]) AS advantages,
               coalesce(s.response_mask, []::BOOLEAN[]) AS mask, {", ".join(columns)}
        FROM (SELECT * FROM sequences WHERE {within}) AS s {" ".join(joins)}
    """


def _joined(how: str, name: str, scored: str, within: str, *, first: bool) -> str:
    """Join a pass; `first` takes the first inner iteration alone."""
    only = " AND iteration = 0" if first else ""
    rows = (
        "SELECT run, step, seq_id, iteration, logprobs, writer, forward_id FROM scores "
        f'WHERE "pass" = {quoted(scored)} AND {within}{only}'
    )
    return f"{how} ({rows}) AS {name} ON {name}.run = s.run AND {name}.step = s.step AND {name}.seq_id = s.seq_id"
