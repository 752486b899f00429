"""Write the SQL queries that compute the breakdowns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...schemas.loss import CURRENT, ROLLOUT, SEQUENCE_MEAN, TOKEN, VESPO, Loss
from ..statistics.loss import sql_options
from ..trace.macros import quoted, quoted_pair
from ..trace.source import Pair

NUM_PROBABILITIES = 40
NUM_DIFFERENCES = 41
NUM_RATIOS = 41
ENTROPIES_PER_NAT = 4
MAX_ENTROPIES = 64
"""Number of entropy bins; the last one includes higher entropies (16 nats: nine million equally probable tokens)."""

_ENDS = """\
SELECT count(*), quantile_disc(abs(d), 0.999), quantile_disc(abs(d) / (1 - p), 0.99) FILTER (p < 0.99)
FROM (SELECT d, exp(logprob_b::DOUBLE) AS p FROM pair({pair}) WHERE {compared})"""

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
       count(*) AS num_tokens, avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d
FROM pair({pair})
WHERE {compared}
GROUP BY first_position
ORDER BY first_position"""

_LENGTH = """\
-- Mismatch by length of the response, one row per power of two; nats.
SELECT (2 ** floor(log2(num_response_tokens)))::BIGINT AS shortest,
       count(*) AS num_tokens, avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d
FROM pair({pair})
JOIN (SELECT run, step, seq_id, num_response_tokens FROM sequences) USING (run, step, seq_id)
WHERE {compared}
GROUP BY shortest
ORDER BY shortest"""

_ENTROPY = """\
-- Mismatch by entropy of the sampled distribution, one row per quarter of a nat, the last from {last:g} up; nats.
SELECT {bin} / {per_nat:.1f} AS entropy_from,
       count(*) AS num_tokens, avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d
FROM pair_entropies({pair})
WHERE {compared} AND isfinite(entropy)
GROUP BY entropy_from
ORDER BY entropy_from"""

_RATIOS = """\
-- Number of loss terms by ln ratio ({num} bins, -{reach} to {reach} nats) and sign of the advantage: {what}.
SELECT stage, CASE WHEN advantage > 0 THEN 'positive' ELSE 'negative' END AS sign,
       {bin} AS bin, count(*) AS num_terms
FROM (
{terms}
)
WHERE advantage != 0
GROUP BY ALL
ORDER BY ALL"""

_RATIO_ENDS = """\
SELECT max(largest)
FROM (SELECT quantile_disc(abs(log_ratio), 0.999) AS largest FROM (
{terms}
) WHERE advantage != 0 GROUP BY stage)"""


class Queries:
    """The queries for a pair of passes and a loss, restricted to tokens for which every condition in `within` holds."""

    def __init__(self, pair: Pair, within: Sequence[str], loss: Loss | None, *, has_now: bool):
        self._pair, self._loss, self._has_now = pair, loss, has_now
        self._within = "".join(f" AND {condition}" for condition in within)
        compared = f"mask AND isfinite(d) AND iteration_a = 0 AND iteration_b = 0{self._within}"
        self._common = {"pair": quoted_pair(pair), "compared": compared}

    def ends(self) -> str:
        """Return the query for the number of tokens, the 99.9 % quantile of |d|, and the envelope."""
        return _ENDS.format(**self._common)

    def density(self, reach: float) -> str:
        """Return the query for the number of tokens by bin of probability and bin of d, from -reach to reach."""
        return _DENSITY.format(
            num_x=NUM_PROBABILITIES, num_y=NUM_DIFFERENCES, reach=reach,
            x=_bin("exp(logprob_b::DOUBLE)", 0.0, NUM_PROBABILITIES, NUM_PROBABILITIES),
            y=_bin("d", reach, NUM_DIFFERENCES / (2 * reach), NUM_DIFFERENCES), **self._common,
        )  # fmt: skip

    def profile(self, axis: str) -> str:
        """Return the query for the mismatch by position, length or entropy: start of a bin, number of tokens, mean |d|, rms d."""
        entropy = _bin("entropy", 0.0, ENTROPIES_PER_NAT, MAX_ENTROPIES)
        return {"position": _POSITION, "length": _LENGTH, "entropy": _ENTROPY}[axis].format(
            bin=entropy, per_nat=ENTROPIES_PER_NAT, last=(MAX_ENTROPIES - 1) / ENTROPIES_PER_NAT, **self._common
        )

    def ratio_ends(self) -> str:
        """Return the query for the largest 99.9 % quantile of |ln ratio| before and after the loss's clip."""
        return _RATIO_ENDS.format(terms=self._terms())

    def ratios(self, reach: float) -> str:
        """Return the query for the number of loss terms by stage, sign of the advantage, and bin of ln ratio."""
        what = f"before, {CURRENT if self._has_now else self._pair[0]} / {self._pair[1]}"
        what += "" if self._loss is None else "; after, the factor on the advantage in the loss"
        place = _bin("log_ratio", reach, NUM_RATIOS / (2 * reach), NUM_RATIOS)
        return _RATIOS.format(num=NUM_RATIOS, reach=reach, what=what, terms=self._terms(), bin=place)

    def _terms(self) -> str:
        """Return a query with the advantage and the ln ratio of each loss term, in each stage."""
        terms, loss = _of_sequences(_of_tokens(self._pair, self._has_now, self._within), self._loss), self._loss
        if loss is None:
            return f"    SELECT advantage, 'before' AS stage, before AS log_ratio FROM (\n{terms}\n    )"
        used = {ROLLOUT: "before", CURRENT: "0.0::DOUBLE"}.get(loss.denominator, "moved")
        after = f"loss_log_weight(used, advantage, {sql_options(loss)})"
        return (
            f"    SELECT advantage, unnest(['before', 'after']) AS stage, unnest([before, {after}]) AS log_ratio\n"
            f"    FROM (\n        SELECT advantage, before, {used} AS used\n        FROM (\n{terms}\n        )\n    )"
        )


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
    """Return the SQL expression for the number of a value's bin; values outside are in the first or last bin."""
    shifted = f"({value} + {_literal(reach)})" if reach else value
    return f"greatest(least(floor({shifted} * {_literal(per_nat)}), {num - 1}), 0)::INTEGER"


def _literal(number: float) -> str:
    """Return a number as SQL text that is read as the same DOUBLE; without an exponent it would be read as a
    DECIMAL."""
    if math.isinf(number):
        return f"'{number}'::DOUBLE"
    return f"{float(number):e}" if float(f"{float(number):e}") == number else f"{float(number):.17e}"
