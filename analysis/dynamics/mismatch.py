"""The mismatch by step: from the sums that the trace keeps, or from one pass over both passes' tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trace.database import Database, quoted
from ..trace.pairs import quoted_pair
from ..trace.source import Pair
from .columns import Column, by_step, columns_of

_KEPT = """
SELECT step, sum(num_tokens) AS n, sum(sum_d) AS d, sum(sum_abs_d) AS abs_d, sum(sum_k3) AS total_k3,
       max(max_abs_d) AS max_abs_d,
       sum(sum_weight * exp(peak_d - top_d)) ** 2 / (n * sum(sum_weight2 * exp(2 * (peak_d - top_d)))) AS ess,
       sum(sum_k3) FILTER (advantage > 0) / nullif(sum(num_tokens) FILTER (advantage > 0), 0) AS k3_positive,
       sum(sum_k3) FILTER (advantage < 0) / nullif(sum(num_tokens) FILTER (advantage < 0), 0) AS k3_negative,
       any_value(p99_abs_d) AS p99_abs_d
FROM (SELECT *, max(peak_d) OVER (PARTITION BY run, step) AS top_d FROM pair_sums({pair})) AS kept
LEFT JOIN (SELECT run, step, seq_id, advantage FROM sequences) USING (run, step, seq_id)
LEFT JOIN step_cuts({pair}) USING (run, step)
WHERE run = $run
GROUP BY step ORDER BY step
"""

_TOKENS = """
SELECT step, count(*) AS n, sum(d) AS d, sum(abs(d)) AS abs_d, sum(k3) AS total_k3, max(abs(d)) AS max_abs_d,
       effective_share(
           count(*), max(d), sum(weight), sum(weight * weight), list(d) FILTER (abs(d) > 300)
       ) AS ess,
       quantile_cont(abs(d), 0.99) AS p99_abs_d, -avg(logprob_a) AS estimate{by_sign}
FROM (
    SELECT *, CASE WHEN abs(d) < 1 THEN 1 + d + k3 WHEN abs(d) <= 300 THEN exp(d) END AS weight
    FROM (
        SELECT *, expm1_minus(d) AS k3
        FROM (
            SELECT step, logprob_a, logprob_a - logprob_b AS d{advantage}
            FROM (
                SELECT a.step, unnest(a.logprobs)::DOUBLE AS logprob_a, unnest(b.logprobs)::DOUBLE AS logprob_b
                       {unnested}
                FROM scores AS a
                JOIN scores AS b ON b.run = a.run AND b.step = a.step AND b.seq_id = a.seq_id{sequences}
                WHERE a.run = $run AND b.run = $run AND a."pass" = {a} AND b."pass" = {b}
                  AND a.iteration = 0 AND b.iteration = 0
            )
            WHERE isfinite(logprob_a) AND isfinite(logprob_b){masked}
        )
    )
)
GROUP BY step ORDER BY step
"""

_BY_SIGN = """,
       avg(k3) FILTER (advantage > 0) AS k3_positive, avg(k3) FILTER (advantage < 0) AS k3_negative"""

_MASK = ", unnest(coalesce(s.response_mask, list_resize([]::BOOLEAN[], s.num_response_tokens, true))) AS mask"
_ADVANTAGES = ", unnest(coalesce(s.advantages::DOUBLE[], list_resize([]::DOUBLE[], s.num_response_tokens, s.advantage))) AS advantage"


_SEQUENCES = """
                JOIN sequences AS s ON s.run = a.run AND s.step = a.step AND s.seq_id = a.seq_id"""
"""Read where masks or advantages are asked for; without, its keys would take a third of the time."""


@dataclass(frozen=True, slots=True)
class StepMismatch:
    """What two passes say of the same tokens, by step."""

    columns: list[Column]
    estimate: Column | None
    """-mean logprob of pass a, which estimates the entropy of what was sampled; None where sums were read."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the sequences of a run have."""

    masks: bool
    advantage: bool
    """One for a whole response."""
    advantages: bool
    """One for each token."""


def held(database: Database, run: str) -> Held:
    """Look which optional columns of the sequences have a value."""
    query = "SELECT count(response_mask), count(advantage), count(advantages) FROM sequences WHERE run = $run"
    ((masks, advantage, advantages),) = database.connection.execute(query, {"run": run}).fetchall()
    return Held(masks > 0, advantage > 0, advantages > 0)


def read_step_mismatch(database: Database, pair: Pair, run: str) -> StepMismatch:
    """Read the mismatch by step; no columns where the passes share no token."""
    has = held(database, run)
    if pair in database.covered and not has.advantages and _used_once(database, pair):
        rows = by_step(database, _KEPT.format(pair=quoted_pair(pair)), {"run": run})
    else:
        rows = by_step(database, _of_tokens(pair, has), {"run": run})
    return _gap(rows, pair)


def _gap(rows: dict[str, np.ndarray], pair: Pair) -> StepMismatch:
    n = rows.pop("n")
    with np.errstate(divide="ignore", invalid="ignore"):
        for name, total in (("k3", "total_k3"), ("mean_d", "d"), ("mean_abs_d", "abs_d")):
            rows[name] = rows[total] / n
    names = f"{pair[0]} - {pair[1]}"
    sources = dict.fromkeys(("k3", "mean_abs_d", "p99_abs_d", "max_abs_d", "mean_d", "ess"), f"d = {names}, nats")
    sources |= {
        "k3_positive": f"d = {names}, nats, where the advantage is above 0",
        "k3_negative": f"d = {names}, nats, where the advantage is below 0",
    }
    estimate = None
    if "estimate" in rows and len(n):
        source = f"estimated by -mean logprob of {pair[0]}, nats"
        estimate = Column("entropy", rows["step"], rows["estimate"], source)
    return StepMismatch(columns_of(rows, sources), estimate)


def _of_tokens(pair: Pair, has: Held) -> str:
    unnested, masked, advantage, by_sign = "", "", "", ""
    sequences = _SEQUENCES if has.masks or has.advantage or has.advantages else ""
    if has.masks:
        unnested, masked = unnested + _MASK, " AND mask"
    if has.advantage or has.advantages:
        unnested += _ADVANTAGES if has.advantages else ", s.advantage"
        advantage, by_sign = ", advantage", _BY_SIGN
    return _TOKENS.format(
        a=quoted(pair[0]),
        b=quoted(pair[1]),
        sequences=sequences,
        unnested=unnested,
        masked=masked,
        advantage=advantage,
        by_sign=by_sign,
    )


def _used_once(database: Database, pair: Pair) -> bool:
    """Whether the sums are of first uses alone."""
    query = f"SELECT coalesce(max(greatest(iteration_a, iteration_b)), 0) FROM pair_sums({quoted_pair(pair)})"
    return bool(database.connection.execute(query).fetchall() == [(0,)])
