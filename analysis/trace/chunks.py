"""Divide runs into chunks of whole steps that are small enough to process at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from .database import Database
from .macros import quoted, sql_file
from .source import Pair
from .tokens import CHUNK_TOKENS, packed, unit_tokens

CHUNK_SEQUENCES = 1 << 18
"""Maximum number of sequences to process at once. Each takes 0.2 KB of memory."""


@dataclass(frozen=True, slots=True)
class Chunk:
    run: str
    first_step: int
    last_step: int
    num_tokens: int
    num_sequences: int
    is_missing: bool


Unit = tuple[Chunk, ...]
_SIZE = attrgetter("num_tokens", "num_sequences")


def steps_of(database: Database, run: str | None = None) -> list[Chunk]:
    query = f"""
        SELECT run, step, sum(num_response_tokens)::BIGINT, count(*) FROM sequences
        {"" if run is None else f"WHERE run = {quoted(run)}"} GROUP BY run, step ORDER BY run, step
    """
    places = {source.run: place for place, source in enumerate(database.sources)}
    steps = [
        Chunk(run, step, step, num_tokens, num_sequences, True)
        for run, step, num_tokens, num_sequences in database.connection.execute(query).fetchall()
    ]
    return sorted(steps, key=lambda step: places[step.run])


def marked_chunks(database: Database, pair: Pair, steps: Sequence[Chunk]) -> list[Chunk]:
    query = "SELECT DISTINCT run FROM sequence_sums WHERE pass_a = ? AND pass_b = ?"
    kept = {run for (run,) in database.connection.execute(query, [*pair]).fetchall()}
    missing = set()
    for chunk in _joined((step for step in steps if step.run in kept), CHUNK_TOKENS):
        names = {"a": quoted(pair[0]), "b": quoted(pair[1]), "run": quoted(chunk.run)}
        query = sql_file("missing").format(**names, first_step=chunk.first_step, last_step=chunk.last_step)
        missing |= {(chunk.run, step) for (step,) in database.connection.execute(query).fetchall()}
    return chunks_of(
        database,
        [replace(step, is_missing=step.run not in kept or (step.run, step.first_step) in missing) for step in steps],
    )


def chunks_of(database: Database, steps: Sequence[Chunk]) -> list[Chunk]:
    return list(_joined(steps, _most_tokens(database, steps)))


def run_chunks(database: Database, run: str) -> list[Chunk]:
    return chunks_of(database, steps_of(database, run))


def units_of(database: Database, chunks: Sequence[Chunk]) -> list[Unit]:
    most_tokens, num_chunks = _most_tokens(database, chunks), Counter(chunk.run for chunk in chunks)
    units: list[Unit] = []
    for is_whole, parts in groupby(chunks, key=lambda chunk: num_chunks[chunk.run] == 1):
        if is_whole:
            units += map(tuple, packed(parts, _SIZE, (most_tokens, CHUNK_SEQUENCES)))
        else:
            units += [(chunk,) for chunk in parts]
    return units


def _joined(steps: Iterable[Chunk], most_tokens: int) -> Iterator[Chunk]:
    for _, of_kind in groupby(steps, key=lambda step: (step.run, step.is_missing)):
        for part in packed(of_kind, _SIZE, (most_tokens, CHUNK_SEQUENCES)):
            num_tokens, num_sequences = (sum(sizes) for sizes in zip(*map(_SIZE, part), strict=True))
            yield replace(part[0], last_step=part[-1].last_step, num_tokens=num_tokens, num_sequences=num_sequences)


def _most_tokens(database: Database, steps: Sequence[Chunk]) -> int:
    return unit_tokens(database, CHUNK_TOKENS, sum(step.num_tokens for step in steps))
