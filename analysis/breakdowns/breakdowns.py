"""Break down a mismatch by probability, position, length and entropy: token counts and mean |d| per bin.

Shapes: X probability bins, Y d bins, B non-empty bins in a profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.loss import CURRENT
from ..statistics.estimators import Array
from ..trace.columns import passes_with
from ..trace.database import Database
from ..trace.macros import quoted, quoted_pair
from ..trace.ragged import array_of
from ..trace.source import Pair
from ..trace.table_views import step_condition
from ..trace.tokens import evenly_spaced, tokens_by_step

NUM_PROBABILITIES = 40
NUM_DIFFERENCES = 41
ENTROPIES_PER_NAT = 4
MAX_ENTROPIES = 64
"""Number of entropy bins, up to 16 nats (nine million equally likely tokens). The last bin also covers all higher
entropies."""

_DENSITY = """\
-- Number of tokens by probability under pass b (x: {num_x} equal bins, 0 to 1) and by d (y: {num_y} bins, -{reach} to {reach} nats).
SELECT {x} AS x, {y} AS y, count(*) AS num_tokens
FROM pair({pair})
WHERE {compared}
GROUP BY x, y
ORDER BY x, y"""

_PROFILE = """\
-- Mismatch by {title}; nats.
SELECT {value} AS {name},
       count(*) AS num_tokens, avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d
FROM {rows}
WHERE {compared}
GROUP BY {name}
ORDER BY {name}"""

_LENGTHS = "(SELECT run, step, seq_id, num_response_tokens FROM sequences) USING (run, step, seq_id)"


class Queries:
    def __init__(self, pair: Pair, within: Sequence[str]):
        self._compared = " AND ".join(["mask AND isfinite(d) AND iteration_a = 0 AND iteration_b = 0", *within])
        self._pair = quoted_pair(pair)

    def ends(self) -> str:
        return f"""
            SELECT count(*) AS num, quantile_disc(abs(d), 0.999) AS largest,
                   quantile_disc(abs(d) / (1 - p), 0.99) FILTER (p < 0.99) AS envelope
            FROM (SELECT d, exp(logprob_b::DOUBLE) AS p FROM pair({self._pair}) WHERE {self._compared})
        """

    def density(self, reach: float) -> str:
        return _DENSITY.format(
            num_x=NUM_PROBABILITIES, num_y=NUM_DIFFERENCES, reach=reach, pair=self._pair, compared=self._compared,
            x=_bin("exp(logprob_b::DOUBLE)", 0.0, NUM_PROBABILITIES, NUM_PROBABILITIES),
            y=_bin("d", reach, NUM_DIFFERENCES / (2 * reach), NUM_DIFFERENCES),
        )  # fmt: skip

    def profile(self, axis: str) -> str:
        pair, entropy = f"pair({self._pair})", _bin("entropy", 0.0, ENTROPIES_PER_NAT, MAX_ENTROPIES)
        last = (MAX_ENTROPIES - 1) / ENTROPIES_PER_NAT
        title, name, value, rows, compared = {
            "position": (
                "position in the response, one row per power of two", "first_position",
                "CASE WHEN position = 0 THEN 0 ELSE (2 ** floor(log2(position)))::BIGINT END", pair, self._compared,
            ),
            "length": (
                "length of the response, one row per power of two", "shortest",
                "(2 ** floor(log2(num_response_tokens)))::BIGINT", f"{pair}\nJOIN {_LENGTHS}", self._compared,
            ),
            "entropy": (
                f"entropy of the sampled distribution, one row per 0.25 nats, the last from {last:g} nats upward",
                "entropy_from",
                f"{entropy} / {ENTROPIES_PER_NAT:.1f}", f"pair_entropies({self._pair})", f"{self._compared} AND isfinite(entropy)",
            ),
        }[axis]  # fmt: skip
        return _PROFILE.format(title=title, name=name, value=value, rows=rows, compared=compared)


def _bin(value: str, reach: float, per_nat: float, num: int) -> str:
    shifted = f"({value} + {_literal(reach)})" if reach else value
    return f"greatest(least(floor({shifted} * {_literal(per_nat)}), {num - 1}), 0)::INTEGER"


def _literal(number: float) -> str:
    """Format a number so that DuckDB parses it as exactly this DOUBLE, not as a DECIMAL."""
    return f"{float(number):e}" if float(f"{float(number):e}") == number else f"{float(number):.17e}"


KEY = "md5_number_lower(step::VARCHAR || ' ' || seq_id)"
"""SQL hash for sampling sequences."""
SMALLEST = 1e-6
"""Half-width (nats) of the d axis if every d is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The mismatch along one axis, as [B] arrays: token count, mean |d| (nats) and rms d (nats) per bin."""

    start: Array
    """Lower end of each bin: a position from 0, a length in tokens, or an entropy in nats."""
    num: np.ndarray
    mean_abs_d: Array
    rms_d: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdowns:
    """A run's mismatch in bins, computed from all tokens or a sample of them. d = logprob(a) - logprob(b) (nats)."""

    num_tokens: int
    """Number of tokens read that are in the loss and have a finite logprob in both passes."""
    num_recorded_tokens: int
    """Number of response tokens in the whole run."""
    how: str
    """Sentence that says which tokens were read."""
    d_edges: Array
    """[Y + 1] bin edges (nats), symmetric about 0. The first and last bins include values beyond them."""
    density: np.ndarray
    """[Y, X] int64 token counts by d (Y) and by probability under pass b (X equal bins from 0 to 1)."""
    profiles: dict[str, Profile]
    """Profiles by `position`, `length` and, if recorded, `entropy`, which excludes tokens with a non-finite entropy."""
    envelope: float | None
    """Constant c (nats) such that |d| <= c (1 - p) for 99% of the tokens with p < 0.99 under pass b. Logit errors up
    to c / 2 lead to this bound (arXiv 2512.23087). None if no token has p < 0.99."""
    sql: dict[str, str]
    """SQL queries over the whole run, for `density` and the profiles `position`, `length` and `entropy`."""


def read_breakdowns(
    database: Database, pair: Pair = ("train", "rollout"), *, notable: Sequence[int] = (), max_steps: int = 200,
    max_tokens: int = 4_000_000,
) -> Breakdowns | None:  # fmt: skip
    """Break down the first open run's mismatch. Return None if no loss token has a finite logprob in both passes.

    Only the first use of each sequence (iteration 0) is read, at up to `max_steps` steps: the `notable` ones, and
    evenly spaced others. If there are more than `max_tokens` tokens, whole sequences are sampled by a hash of step and
    seq_id, so the sample does not depend on row order.
    """
    run = database.sources[0].run
    tokens = tokens_by_step(database, run)
    steps, how = _steps(database, pair, run, notable, max_steps)
    if not steps:
        return None
    read = [f"run = {quoted(run)}", step_condition(steps)]
    if sum(tokens.get(step, 0) for step in steps) > max_tokens:
        more, of_sequences = _sequences(database, pair, run, steps, max_tokens)
        read, how = read + more, how + of_sequences
    shown = [f"run = {quoted(run)}"] if len(database.sources) > 1 else []
    shown += [condition] if (condition := database.step_condition(run)) else []
    asked, told = Queries(pair, read), Queries(pair, shown)

    (ends,) = database.ask(asked.ends()).dicts()
    if not (num_tokens := ends["num"]):
        return None
    reach = rounded_up(ends["largest"])
    density = np.zeros((NUM_DIFFERENCES, NUM_PROBABILITIES), np.int64)
    for row in database.ask(asked.density(reach)).dicts():
        density[row["y"], row["x"]] = row["num_tokens"]
    axes = ["position", "length"]
    if passes_with(database, "entropy", run, of=(*pair, CURRENT), first_use=True):
        axes.append("entropy")
    sql = {"density": told.density(reach)} | {axis: told.profile(axis) for axis in axes}
    profiles = {axis: rows for axis in axes if (rows := database.ask(asked.profile(axis)).rows)}
    recorded = sum(tokens.values())
    share = f"all {recorded:,}" if num_tokens == recorded else f"{num_tokens:,} of {recorded:,}"
    return Breakdowns(
        num_tokens=num_tokens, num_recorded_tokens=recorded,
        how=f"compared {share} recorded tokens: {how}.",
        d_edges=np.linspace(-reach, reach, NUM_DIFFERENCES + 1), density=density, envelope=ends["envelope"],
        profiles={axis: Profile(**dict(zip(Profile.__slots__, map(np.array, zip(*rows, strict=True)), strict=True)))
                  for axis, rows in profiles.items()},
        sql=sql,
    )  # fmt: skip


def rounded_up(value: float) -> float:
    """Round a number up to two significant digits.

    >>> rounded_up(0.1234)
    0.13
    """
    if value <= 0:
        return SMALLEST
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")


def _steps(
    database: Database, pair: Pair, run: str, notable: Sequence[int], max_steps: int
) -> tuple[tuple[int, ...], str]:
    query = f"""
        SELECT step FROM scores WHERE run = $run AND iteration = 0 AND "pass" IN ({quoted_pair(pair)})
        GROUP BY step HAVING count(DISTINCT "pass") = {len(set(pair))} ORDER BY step
    """
    known = [step for (step,) in database.connection.execute(query, {"run": run}).fetchall()]
    if len(known) <= max_steps:
        every = "the one step" if len(known) == 1 else f"all {len(known):,} steps"
        return tuple(known), f"{every} scored by both passes"
    named = [step for step in dict.fromkeys(notable) if step in set(known)][:max_steps]
    spread = evenly_spaced([step for step in known if step not in set(named)], max_steps - len(named))
    parts = [f"{len(named):,} notable"] * bool(named) + [f"{len(spread):,} evenly spaced"] * bool(spread)
    how = f"{len(named) + len(spread):,} of the {len(known):,} steps scored by both passes ({' and '.join(parts)})"
    return tuple(sorted([*named, *spread])), how


def _sequences(
    database: Database, pair: Pair, run: str, steps: tuple[int, ...], max_tokens: int
) -> tuple[list[str], str]:
    within = f"run = $run AND step IN ({', '.join(map(str, steps))})"
    a, b = (
        f'(SELECT step, seq_id FROM scores WHERE {within} AND iteration = 0 AND "pass" = {quoted(name)})'
        for name in pair
    )
    query = f"""
        SELECT {KEY} AS key, num_response_tokens
        FROM sequences SEMI JOIN {a} USING (step, seq_id) SEMI JOIN {b} USING (step, seq_id)
        WHERE {within}
        ORDER BY key
    """
    rows = database.connection.sql(query, params={"run": run}).to_arrow_table()
    total = np.cumsum(array_of(rows["num_response_tokens"]).astype(np.int64))
    num = max(int(np.searchsorted(total, max_tokens, "right")), 1)
    if num >= len(total):
        return [], ""
    return [f"{KEY} <= {rows['key'][num - 1].as_py()}"], (
        f"; {num:,} of their {len(total):,} sequences, chosen by a hash of step and seq_id, to read at most "
        f"{max_tokens:,} tokens"
    )
