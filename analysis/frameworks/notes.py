from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...schemas.errors import options
from ...schemas.passes import CURRENT
from ..trace.macros import quoted

if TYPE_CHECKING:
    from ..trace.database import Database
    from ..trace.source import Pair


def null_without(
    database: Database, names: Sequence[str], scored: str, *, column: str = "logprobs", what: str = "pass"
) -> list[str]:
    query = f'SELECT DISTINCT run FROM scores WHERE "pass" = {quoted(scored)} AND {column} IS NOT NULL'
    known = {run for (run,) in database.connection.execute(query).fetchall()}
    lacking = [source.run for source in database.sources if source.run not in known]
    if not lacking or not names:
        return []
    verb = "is" if len(names) == 1 else "are"
    return [f"{', '.join(lacking)}: no {what} {scored!r} recorded, so {', '.join(names)} {verb} NULL"]


def masked_out(
    database: Database, passes: Sequence[str], framework: str, *,
    effect: str = "its logged values at these steps can be NaN",
) -> list[str]:  # fmt: skip
    """Warn about non-finite logprobs on masked tokens, for frameworks that multiply by the mask.

    NaN * 0 and inf * 0 are NaN, so such a token turns the framework's sums into NaN, while tim-trace skips it.
    """
    query = f"""
        SELECT count(*), count(DISTINCT (run, step))
        FROM (
            SELECT s.run, s.step, unnest(s.response_mask) AS mask, unnest(scores.logprobs) AS logprob
            FROM sequences AS s
            JOIN scores ON scores.run = s.run AND scores.step = s.step AND scores.seq_id = s.seq_id
            WHERE scores."pass" IN ({", ".join(map(quoted, passes))}) AND list_contains(s.response_mask, false)
        )
        WHERE NOT isfinite(logprob) AND NOT mask
    """
    ((num_logprobs, num_steps),) = database.connection.execute(query).fetchall()
    if not num_logprobs:
        return []
    return [
        f"{num_logprobs:,} logprobs at {num_steps:,} steps are NaN or infinite on masked tokens: {framework} multiplies by a "
        f"mask of 0, which gives NaN, so {effect}; tim-trace leaves such tokens out"
    ]


def without_current(database: Database, pair: Pair, framework: str, *names: str) -> list[str]:
    """Report metrics that are NULL without the `current` pass, and masked tokens (see masked_out)."""
    return null_without(database, names, CURRENT) + masked_out(database, (*pair, CURRENT), framework)


def in_half(database: Database, scored: str, framework: str) -> list[str]:
    query = f"""
        SELECT DISTINCT run, json_extract_string(contract_json, '$.logprobs_dtype') AS dtype
        FROM passes
        WHERE "pass" = {quoted(scored)} AND dtype IN ('bfloat16', 'float16')
        ORDER BY run, dtype
    """
    found = database.connection.execute(query).fetchall()
    return [
        f"{run}: {framework} averages the logprobs of {scored} in {dtype}, so its logged values have about 3 correct "
        "digits; the numbers here are float64 sums of the same logprobs"
        for run, dtype in found
    ]


def set_otherwise(database: Database, given: Mapping[str, object]) -> list[str]:
    from ..trace.columns import read_hyperparameters  # loads DuckDB, which help pages do not need

    told = []
    for source in database.sources:
        trained = read_hyperparameters(database, source.run)
        other: dict[str, object] = {
            name: True if isinstance(value, bool) else trained[name]
            for name, value in given.items()
            if name in trained and trained[name] not in (value, "None")
        }
        if other:
            told.append(
                f"{source.run} was trained with different options; to reproduce its logged numbers, use "
                f"{options({'by': 'step'} | other)}"
            )
    return told
