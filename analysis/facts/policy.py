"""Read the state of the policy by step: entropy, policy lag, and the share of tokens that the loss clips."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas import loss as losses
from ...schemas.loss import read_loss
from ..statistics.loss import sql_options
from ..trace.columns import passes_with, read_hyperparameters, sequence_columns
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.source import Pair
from .series import Column, by_step, columns_of

_ENTROPY = """
SELECT step, avg({value}) AS entropy
FROM (
    SELECT s.step, unnest(p.{column})::DOUBLE AS x{mask}
    FROM sequences AS s JOIN scores AS p ON p.run = s.run AND p.step = s.step AND p.seq_id = s.seq_id
    WHERE s.run = $run AND p.run = $run AND p."pass" = $name AND p.iteration = 0
)
WHERE isfinite(x){masked}
GROUP BY step ORDER BY step
"""

_LAGS = """
SELECT s.step,
       avg(p.policy_version - s.policy_version) FILTER (p."pass" = $loss) AS policy_lag,
       avg(p.policy_version - coalesce(b.policy_version, {sampled}))
           FILTER (p."pass" = {a} AND p.iteration = 0) AS version_lag
FROM sequences AS s
JOIN (SELECT run, step, seq_id, "pass", iteration, policy_version FROM scores WHERE "pass" IN ($loss, {a})) AS p
  ON p.run = s.run AND p.step = s.step AND p.seq_id = s.seq_id
LEFT JOIN (
    SELECT run, step, seq_id, policy_version FROM scores WHERE "pass" = {b} AND iteration = 0
) AS b ON b.run = s.run AND b.step = s.step AND b.seq_id = s.seq_id
WHERE s.run = $run
GROUP BY s.step ORDER BY s.step
"""

_CLIPPED = """
SELECT step, coalesce(sum(n) FILTER (loss_clips(clamped_exp(log_ratio), advantage, {loss})), 0) / sum(n) AS clip_share
FROM (
    SELECT step, {terms}
    FROM (
        SELECT s.step, s.seq_id, p.iteration, {advantage} AS advantage,
               unnest(p.logprobs)::DOUBLE AS above, unnest(q.logprobs)::DOUBLE AS below{mask}
        FROM sequences AS s
        JOIN scores AS p ON p.run = s.run AND p.step = s.step AND p.seq_id = s.seq_id
        JOIN scores AS q ON q.run = s.run AND q.step = s.step AND q.seq_id = s.seq_id
        WHERE s.run = $run AND p.run = $run AND q.run = $run
          AND p."pass" = 'current' AND q."pass" = $below AND q.iteration = 0
    )
    WHERE isfinite(above) AND isfinite(below){masked}
    {grouped}
)
WHERE isfinite(advantage)
GROUP BY step ORDER BY step
"""

_TERMS = "above - below AS log_ratio, advantage, 1 AS n"
_SEQUENCES = (
    "{mean}(above - below) AS log_ratio, avg(advantage) FILTER (isfinite(advantage)) AS advantage, count(*) AS n"
)

_MASK = ", unnest(coalesce(s.response_mask, list_resize([]::BOOLEAN[], s.num_response_tokens, true))) AS mask"
_ADVANTAGES = "unnest(coalesce(s.advantages::DOUBLE[], list_resize([]::DOUBLE[], s.num_response_tokens, s.advantage)))"


@dataclass(frozen=True, slots=True)
class Given:
    """Which optional score columns a run recorded; they decide the source of each series for all steps."""

    entropy: frozenset[str] = frozenset()
    """Passes with token entropies."""
    version: frozenset[str] = frozenset()
    """Passes with a recorded policy version."""

    def __or__(self, other: Given) -> Given:
        return Given(self.entropy | other.entropy, self.version | other.version)


def read_given(database: Database, run: str) -> Given:
    """Return the optional score columns that have values, by pass."""
    return Given(passes_with(database, "entropy", run), passes_with(database, "policy_version", run))


def read_entropy(
    database: Database,
    run: str,
    pass_a: str,
    metrics: list[Column],
    estimate: Column | None,
    given: Given | None = None,
) -> list[Column]:
    """Read the token entropy of `train` or `current`; if missing, use the logged one in `metrics`, else the estimate.

    The estimate is -mean logprob of pass a, whose expected value over samples of the policy is the entropy. `given`
    describes the whole run if the database has only some of its steps.
    """
    given = given or read_given(database, run)
    for name in ("train", "current"):
        if name in given.entropy:
            what = f"mean entropy over the tokens of {name}, nats"
            return columns_of(_mean(database, run, name, "entropy"), {"entropy": what})
    if any(column.name == "entropy" for column in metrics):
        return []
    if estimate is not None:
        return [estimate]
    if not passes_with(database, "logprobs", run, of=[pass_a]):
        return []
    what = f"estimated as -mean logprob of {pass_a}, nats"
    return columns_of(_mean(database, run, pass_a, "logprobs"), {"entropy": what})


def read_lags(database: Database, pair: Pair, run: str, given: Given | None = None) -> list[Column]:
    """Read the numbers of updates from sampling to loss, and from pass b to pass a; `given` as in read_entropy."""
    given = given or read_given(database, run)
    loss = "current" if "current" in given.version else "train"
    # Without its own policy version, an engine's score has that of the sequence.
    sampled = "s.policy_version" if pair[1] == "rollout" else "NULL"
    query = _LAGS.format(a=quoted(pair[0]), b=quoted(pair[1]), sampled=sampled)
    sources = {
        "policy_lag": f"number of updates between the sampling weights and the weights of {loss}",
        "version_lag": f"number of updates between the weights of {pair[1]} and those of {pair[0]}",
    }
    return columns_of(by_step(database, query, {"run": run, "loss": loss}), sources)


def read_clipping(database: Database, run: str) -> list[Column]:
    """Read the share of tokens with an advantage that the recorded loss clips, as defined in analysis.objective.

    Empty if the recorded loss does not clip. In a sequence-level loss, all tokens share the ratio of their sequence.
    """
    loss = read_loss(read_hyperparameters(database, run))
    if loss is None or loss.denominator == losses.CURRENT or not loss.has_clip:
        return []
    has = sequence_columns(database, run)
    mean = "avg" if loss.level == losses.SEQUENCE_MEAN else "sum"
    query = _CLIPPED.format(
        loss=sql_options(loss),
        terms=_TERMS if loss.level == losses.TOKEN else _SEQUENCES.format(mean=mean),
        grouped="" if loss.level == losses.TOKEN else "GROUP BY step, seq_id, iteration",
        advantage=_ADVANTAGES if has.advantages else "s.advantage",
        mask=_MASK if has.mask else "",
        masked=" AND mask" if has.mask else "",
    )
    source = f"share of tokens that {loss.kind} clips by the ratio current / {loss.denominator}"
    return columns_of(by_step(database, query, {"run": run, "below": loss.denominator}), {"clip_share": source})


def _mean(database: Database, run: str, name: str, column: str) -> dict[str, np.ndarray]:
    has = sequence_columns(database, run)
    query = _ENTROPY.format(
        column=column,
        value="x" if column == "entropy" else "-x",
        mask=_MASK if has.mask else "",
        masked=" AND mask" if has.mask else "",
    )
    with database.following(f"reading {column} by step"):
        return by_step(database, query, {"run": run, "name": name})
