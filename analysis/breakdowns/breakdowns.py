"""Break down a mismatch: counts and means by probability, position, length, entropy and the loss's ratios."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...schemas.loss import TOKEN, Loss, read_loss
from ..statistics.estimators import Array
from ..trace.connection import mapped
from ..trace.database import Database
from ..trace.hyperparameters import read_hyperparameters
from ..trace.ragged import Tokens, blocks
from ..trace.source import Pair
from .counts import Counts, Shapes, counts_of, empty_counts, entropy_bins
from .edges import (
    ENTROPIES_PER_NAT,
    NUM_DIFFERENCES,
    NUM_PROBABILITIES,
    NUM_RATIOS,
    Edges,
    length_edges,
    position_edges,
    rounded_up,
)  # fmt: skip
from .part import Part, part_of
from .queries import queries
from .tokens import ChosenTokens, choose, read_chosen_tokens

_REACH = 0.999
"""Share of the tokens whose values must be within the range of an axis in nats."""
_ENVELOPE = 0.99
_STRIDE = 64
"""Stride of the subsample used to guess a quantile: it contains one of every 64 values."""
_MAX_LOG = 700.0
"""Largest ln ratio on an axis, within the range of float64; a loss with a bound of 0 produces infinite ln ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdowns:
    """Breakdowns of the mismatch over a run or a sample of its tokens; d = logprob(a) - logprob(b), nats."""

    pair: Pair
    """The compared passes a and b."""
    run: str
    num_tokens: int
    """Number of tokens read that count in the loss and have a finite logprob in both passes."""
    num_recorded_tokens: int
    """Number of response tokens in the whole run."""
    steps: tuple[int, ...]
    """Steps read that contain at least one compared token."""
    how: str
    """Sentence on which tokens were read, with numbers."""
    edges: Edges
    """Bin edges of every axis."""
    envelope: float | None
    """c, nats: 99 % of the tokens with p < 0.99 under pass b have |d| <= c (1 - p), which logit errors of c / 2 explain (arXiv
    2512.23087). None if no token has p < 0.99."""
    ratio_level: str
    """Level at which ratios are taken, as in Loss.level; `token` if the loss is unknown."""
    whole: Shapes
    """Breakdowns over all tokens that were read."""
    by_step: dict[int, Shapes]
    sql: dict[str, str]
    """Name of a breakdown (density, position, length, entropy, ratios, envelope) -> query that computes it over the
    whole run."""


def read_breakdowns(
    database: Database,
    pair: Pair = ("train", "rollout"),
    *,
    run: str | None = None,
    notable: Sequence[int] = (),
    loss: Loss | None = None,
    max_steps: int = 200,
    max_tokens: int = 4_000_000,
) -> Breakdowns | None:
    """Break down the mismatch over the tokens of a run; None if its passes share no finite token that counts.

    Only the first use of each sequence is read (iteration 0). Up to `max_steps` steps are read: the `notable` ones and others
    evenly spread. Above `max_tokens` tokens, whole sequences are sampled by a hash of step and seq_id, independent of the order
    of rows.

    `run` defaults to the first open run, `loss` to the recorded one.
    """
    run = run or database.sources[0].run
    chosen = choose(database, pair, run, notable=notable, max_steps=max_steps, max_tokens=max_tokens)
    if not chosen.steps:
        return None
    read = read_chosen_tokens(database, pair, chosen)
    if read is None:
        return None
    loss = loss or read_loss(read_hyperparameters(database, run))
    steps, row_N = np.unique(read.step_N, return_inverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = _parts(pool, read.tokens, row_N, loss)
        num_tokens = sum(len(part.d_T) for part in parts)
        if not num_tokens:
            return None
        edges = _edges(parts, read)
        counts = _counted(pool, parts, edges, len(steps), 1 if loss is None else 2)
    there = np.flatnonzero(counts.density.sum(axis=(1, 2)))
    return Breakdowns(
        pair=pair,
        run=run,
        num_tokens=num_tokens,
        num_recorded_tokens=chosen.num_recorded_tokens,
        steps=tuple(int(steps[row]) for row in there),
        how=f"{num_tokens:,} compared of {chosen.num_recorded_tokens:,} recorded tokens: {chosen.how}.",
        edges=edges,
        envelope=high_quantile([part.scaled for part in parts], _ENVELOPE),
        ratio_level=TOKEN if loss is None else loss.level,
        whole=counts.shapes(None),
        by_step={int(steps[row]): counts.shapes(int(row)) for row in there},
        sql=queries(
            pair, edges, read.has_now, loss, run if len(database.sources) > 1 else None, database.step_condition(run)
        ),
    )


def _parts(pool: ThreadPoolExecutor, tokens: Tokens, row_N: np.ndarray, loss: Loss | None) -> list[Part]:
    return list(mapped(pool, lambda block: part_of(tokens, block, row_N, loss), blocks(tokens.lengths_N)))


def _edges(parts: list[Part], read: ChosenTokens) -> Edges:
    """Return bin edges that cover all but the largest 0.1 % of |d| and ln ratio, and all values on the other axes."""
    longest = int(read.tokens.lengths_N.max())
    reach = rounded_up(high_quantile([part.size_T for part in parts], _REACH) or 0.0)
    return Edges(
        probability=np.linspace(0, 1, NUM_PROBABILITIES + 1),
        d=np.linspace(-reach, reach, NUM_DIFFERENCES + 1),
        position=position_edges(longest),
        length=length_edges(longest),
        entropy=_entropy_edges(parts, read),
        ratio=_ratio_edges(parts, read),
    )


def _entropy_edges(parts: list[Part], read: ChosenTokens) -> np.ndarray | None:
    if read.tokens.entropy_T is None:
        return None
    entropies = [part.entropy_T for part in parts if part.entropy_T is not None]
    largest = max((np.max(each, where=np.isfinite(each), initial=0.0) for each in entropies), default=0.0)
    return np.arange(int(entropy_bins(np.asarray(largest))) + 2) / ENTROPIES_PER_NAT


def _ratio_edges(parts: list[Part], read: ChosenTokens) -> np.ndarray | None:
    if not read.has_advantage:
        return None
    terms = [part.terms for part in parts if part.terms is not None]
    stages = ([each.before_K for each in terms], [each.after_K for each in terms if each.after_K is not None])
    largest = max(high_quantile([np.abs(part) for part in stage], _REACH) or 0.0 for stage in stages)
    reach = rounded_up(min(largest, _MAX_LOG))
    return np.linspace(-reach, reach, NUM_RATIOS + 1)


def _counted(pool: ThreadPoolExecutor, parts: list[Part], edges: Edges, num_steps: int, num_stages: int) -> Counts:
    counts = empty_counts(edges, num_steps, num_stages)
    for found, steps in mapped(pool, partial(counts_of, edges=edges), parts):
        counts.add(found, steps)
    return counts


def high_quantile(parts: Sequence[Array], share: float) -> float | None:
    """Return a discrete quantile, as DuckDB's quantile_disc; None without values.

    Only values above a guess, which is a slightly lower quantile of a subsample, are sorted.
    """
    num = sum(len(part) for part in parts)
    if not num:
        return None
    above = num - max(1, num - math.floor(num - share * num))
    few = np.sort(np.concatenate([part[::_STRIDE] for part in parts]))
    guess = few[max(0, int(len(few) * (1 - 2 * (1 - share))) - 8)]
    kept = np.concatenate([part[part >= guess] for part in parts])
    if len(kept) <= above:
        kept = np.concatenate(parts)
    place = len(kept) - 1 - above
    return float(np.partition(kept, place)[place])
