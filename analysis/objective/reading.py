"""What the loss saw of a trace: sequences with their logprobs under each pass, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ..statistics.intervals import unit
from ..trace.database import Database
from ..trace.tokens import PassRows, token_query
from .pass_roles import PassRoles


def names_of(sides: PassRoles) -> tuple[str, ...]:
    """Names of the passes that are read, each once: `now` is `train` where the loss has no pass of its own."""
    has = {"train": True, "rollout": sides.rollout != sides.train, "now": sides.current != sides.train}
    return tuple(name for name, is_read in has.items() if is_read)


def read_batches(database: Database, sides: PassRoles, steps: range) -> Iterator[pa.RecordBatch]:
    """Batches of the sequences of some steps.

    They are all that went through the loss, also those without a token or without logprobs: see `is_whole`.
    """
    yield from database.connection.batches(_query(sides, steps))


def _query(sides: PassRoles, steps: range) -> str:
    """One row a sequence and inner iteration that the loss's pass has a row of.

    `sequence`, `unit`, its group, and `micro_batch` are numbers, since names take long. `is_whole`: whether every pass gave as
    many logprobs as the response has tokens, of which there is one at least.
    """
    names = names_of(sides)
    now = names[-1] if names[-1] == "now" else "train"
    scored = {"train": sides.train, "rollout": sides.rollout, "now": sides.current}
    lengths = " AND ".join(f"coalesce(len({name}.logprobs) = s.num_response_tokens, false)" for name in names)
    return token_query(
        {
            name: PassRows(
                name=scored[name], iteration=None if name == now else 0, scored=False, optional=name != now
            )
            for name in names
        },
        [
            "s.step", f"{now}.iteration", "hash(s.seq_id) AS sequence", f"{unit('s')} AS unit", "s.num_response_tokens",
            f"CASE WHEN {now}.forward_id IS NULL THEN 0::UBIGINT ELSE hash({now}.writer, {now}.forward_id) END AS micro_batch",
            f"s.num_response_tokens > 0 AND {lengths} AS is_whole",
        ],
        steps=steps,
        lists=["advantage", "advantages", "mask"],
    )  # fmt: skip
