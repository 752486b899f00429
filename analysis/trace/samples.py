"""Passes that a sampled replay made: they have scores of some sequences alone."""

from __future__ import annotations

from collections.abc import Iterable

from ...schemas.errors import tell_samples
from ...schemas.passes import REPLAY_PREFIX
from .database import Database

_SAMPLED = """SELECT DISTINCT "pass" FROM passes WHERE json_extract(contract_json, '$.sample') IS NOT NULL ORDER BY 1"""

_COUNTS = """
    WITH own AS (SELECT DISTINCT run, step, seq_id FROM scores WHERE "pass" = $name)
    SELECT (SELECT count(*) FROM own), count(*) FROM (
        SELECT DISTINCT run, step, seq_id FROM scores
        WHERE "pass" = 'train' AND (run, step) IN (SELECT (run, step) FROM own)
    )
"""


def sampled_passes(database: Database) -> dict[str, tuple[int, int]]:
    """Pass of a sampled replay -> its sequences, and those that `train` has of the same steps; none of a pass that has all."""
    names = [name for (name,) in database.connection.execute(_SAMPLED).fetchall()]
    counts = {name: database.connection.execute(_COUNTS, {"name": name}).fetchall()[0] for name in names}
    return {name: found for name, found in counts.items() if found[0] < found[1]}


def sample_sentence(number: int, total: int) -> str:
    """How much of its steps a sampled pass has."""
    return f"a sample: {number:,} of {total:,} sequences of its steps"


def tell_sampled(database: Database, names: Iterable[str]) -> None:
    """Warn of those passes of a comparison that are a sample."""
    asked = {name for name in names if name.startswith(REPLAY_PREFIX)}
    if asked:
        found = sampled_passes(database)
        tell_samples(f"{name} is {sample_sentence(*found[name])}" for name in sorted(asked & found.keys()))
