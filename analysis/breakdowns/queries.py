"""Write the SQL queries that compute the breakdowns over the whole run."""

from __future__ import annotations

import math

from ...schemas.loss import CURRENT, ROLLOUT, SEQUENCE_MEAN, TOKEN, VESPO, Loss
from ..statistics.loss import sql_options
from ..trace.macros import quoted, quoted_pair
from ..trace.source import Pair
from .edges import (
    ENTROPIES_PER_NAT,
    MAX_ENTROPIES,
    NUM_DIFFERENCES,
    NUM_PROBABILITIES,
    NUM_RATIOS,
    Edges,
    per_unit,
)  # fmt: skip

_PROFILE = "count(*) AS num_tokens, avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d, avg(d) AS mean_d"

_DENSITY = """\
-- Number of tokens by probability under pass b (x: {num_x} equal bins, 0 to 1) and by d (y: {num_y} bins, -{reach} to {reach} nats).
SELECT {x} AS x, {y} AS y, count(*) AS num_tokens
FROM pair({pair})
WHERE {compared}
GROUP BY x, y
ORDER BY x, y"""

_POSITION = """\
-- Mismatch by position in the response, one row per power of two; nats.
SELECT CASE WHEN position = 0 THEN 0 ELSE (2 ** floor(log2(position)))::BIGINT END AS first_position,
       {profile}
FROM pair({pair})
WHERE {compared}
GROUP BY first_position
ORDER BY first_position"""

_LENGTH = """\
-- Mismatch by length of the response, one row per power of two; nats.
SELECT (2 ** floor(log2(num_response_tokens)))::BIGINT AS shortest,
       {profile}
FROM pair({pair})
JOIN (SELECT run, step, seq_id, num_response_tokens FROM sequences) USING (run, step, seq_id)
WHERE {compared}
GROUP BY shortest
ORDER BY shortest"""

_ENTROPY = """\
-- Mismatch by entropy of the sampled distribution, one row per quarter of a nat, the last from {last:g} up; nats.
SELECT {bin} / {per_nat:.1f} AS entropy_from,
       {profile}
FROM pair_entropies({pair})
WHERE {compared} AND isfinite(entropy)
GROUP BY entropy_from
ORDER BY entropy_from"""

_ENVELOPE = """\
-- c: 99 % of the tokens with p < 0.99 under pass b have |d| <= c (1 - p); nats. arXiv 2512.23087.
SELECT quantile_disc(abs(d) / (1 - p), 0.99) AS c
FROM (SELECT d, exp(logprob_b::DOUBLE) AS p FROM pair({pair}) WHERE {compared})
WHERE p < 0.99"""

_RATIOS = """\
-- Number of loss terms by ln ratio ({num} bins, -{reach} to {reach} nats) and sign of the advantage: {what}.
SELECT {stages}CASE WHEN advantage > 0 THEN 'positive' ELSE 'negative' END AS sign,
       {bin} AS bin, count(*) AS num_terms
FROM (
{terms}
)
WHERE advantage != 0
GROUP BY ALL
ORDER BY ALL"""


def queries(pair: Pair, edges: Edges, has_now: bool, loss: Loss | None, run: str | None, steps: str) -> dict[str, str]:
    """Return name of a breakdown -> query, restricted to `run` and to the condition `steps` if these are given."""
    conditions = (*([] if run is None else [f"run = {quoted(run)}"]), *([steps] if steps else []))
    within = "".join(f" AND {condition}" for condition in conditions)
    both, profile = quoted_pair(pair), _PROFILE
    compared = f"mask AND isfinite(d) AND iteration_a = 0 AND iteration_b = 0{within}"
    reach = float(edges.d[-1])
    common = {"pair": both, "compared": compared, "profile": profile}
    found = {
        "density": _DENSITY.format(
            num_x=NUM_PROBABILITIES, num_y=NUM_DIFFERENCES, reach=reach,
            x=_bin("exp(logprob_b::DOUBLE)", 0.0, NUM_PROBABILITIES, NUM_PROBABILITIES),
            y=_bin("d", reach, per_unit(NUM_DIFFERENCES, reach), NUM_DIFFERENCES), **common,
        ),
        "position": _POSITION.format(**common),
        "length": _LENGTH.format(**common),
        "envelope": _ENVELOPE.format(**common),
    }  # fmt: skip
    if edges.entropy is not None:
        found["entropy"] = _ENTROPY.format(
            bin=_bin("entropy", 0.0, ENTROPIES_PER_NAT, MAX_ENTROPIES), per_nat=ENTROPIES_PER_NAT,
            last=(MAX_ENTROPIES - 1) / ENTROPIES_PER_NAT, **common,
        )  # fmt: skip
    if edges.ratio is not None:
        found["ratios"] = _ratios(pair, float(edges.ratio[-1]), has_now, loss, within)
    return found


def _ratios(pair: Pair, reach: float, has_now: bool, loss: Loss | None, within: str) -> str:
    what = f"before, {CURRENT if has_now else pair[0]} / {pair[1]}"
    terms = _of_sequences(_of_tokens(pair, has_now, within), loss)
    stages = ""
    if loss is not None:
        what += "; after, the factor on the advantage in the loss"
        stages = "stage, "
        used = {ROLLOUT: "before", CURRENT: "0.0::DOUBLE"}.get(loss.denominator, "moved")
        after = f"loss_log_weight(used, advantage, {sql_options(loss)})"
        terms = (
            f"    SELECT advantage, unnest(['before', 'after']) AS stage, unnest([before, {after}]) AS log_ratio\n"
            f"    FROM (\n        SELECT advantage, before, {used} AS used\n        FROM (\n{terms}\n        )\n    )"
        )
    return _RATIOS.format(
        num=NUM_RATIOS, reach=reach, what=what, stages=stages, terms=terms,
        bin=_bin("before" if loss is None else "log_ratio", reach, per_unit(NUM_RATIOS, reach), NUM_RATIOS),
    )  # fmt: skip


def _of_tokens(pair: Pair, has_now: bool, within: str) -> str:
    """Return a query with one row per token, where before = ln(current / b) and moved = ln(current / a)."""
    keys = "run, step, seq_id, advantage"
    if has_now:
        return (
            f"            SELECT {keys}, logprob_current - logprob_b AS before, stale AS moved\n"
            f"            FROM pair_now({quoted_pair(pair)}, {quoted(CURRENT)})\n"
            f"            WHERE mask AND isfinite(d) AND isfinite(stale) AND iteration = 0{within}"
        )
    return (
        f"            SELECT {keys}, d AS before, 0.0::DOUBLE AS moved\n"
        f"            FROM pair({quoted_pair(pair)})\n"
        f"            WHERE mask AND isfinite(d) AND iteration_a = 0 AND iteration_b = 0{within}"
    )


def _of_sequences(tokens: str, loss: Loss | None) -> str:
    """Return a query with one row per token that has an advantage, or one row per sequence if the loss takes ratios per
    sequence."""
    if loss is None or loss.level == TOKEN:
        return f"{tokens} AND isfinite(advantage)"
    mean = "avg({})" if loss.level == SEQUENCE_MEAN else "sum({})"
    if loss.kind == VESPO:
        mean = "sum(greatest(least({}, 20.0), -20.0))"
    return (
        "            SELECT avg(advantage) FILTER (isfinite(advantage)) AS advantage,\n"
        f"                   {mean.format('before')} AS before, {mean.format('moved')} AS moved\n"
        f"            FROM (\n{tokens}\n            )\n            GROUP BY run, step, seq_id"
    )


def _bin(value: str, reach: float, per_nat: float, num: int) -> str:
    """Return the SQL expression that corresponds to edges.bins_of."""
    shifted = f"({value} + {_literal(reach)})" if reach else value
    return f"greatest(least(floor({shifted} * {_literal(per_nat)}), {num - 1}), 0)::INTEGER"


def _literal(number: float) -> str:
    """Return a number as SQL text that is read as the same DOUBLE; without an exponent it would be read as a
    DECIMAL."""
    if math.isinf(number):
        return f"'{number}'::DOUBLE"
    return f"{float(number):e}" if float(f"{float(number):e}") == number else f"{float(number):.17e}"
