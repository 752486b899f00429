"""The part of a trace that a check looks at token by token.

Shapes: N tokens of S sequences, the tokens of one sequence after those of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..trace.database import Database, quoted
from ..trace.source import Pair
from .thresholds import MAX_READ_TOKENS, MAX_SAMPLED_STEPS, MAX_SAMPLED_TOKENS, MAX_WORST_STEPS, MIN_SAMPLED_STEPS

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
"""Columns of a sequence's sampling settings."""


@dataclass(kw_only=True)
class Side:
    """One pass, over the sampled tokens."""

    name: str
    logprobs: np.ndarray
    """[N] float64, nats; NaN where there is none."""
    is_null: np.ndarray
    """[N] bool: not recorded."""
    entropy: np.ndarray | None
    """[N] float64, nats, NaN where there is none; None where none was recorded at all."""
    versions: np.ndarray
    """[S] policy version of the scoring weights; NaN where unknown."""
    contracts: list[str | None]
    """[S] hash of each row's contract."""
    writers: list[str]
    """[S] process that recorded the row."""


@dataclass(kw_only=True)
class Sample:
    """Two passes over some steps of a trace."""

    a: Side
    b: Side
    tokens: np.ndarray
    """[N] token ids."""
    mask: np.ndarray
    """[N] bool: counts in the loss."""
    starts: np.ndarray
    """[S + 1] where each sequence's tokens begin."""
    steps: np.ndarray
    """[S]"""
    seq_ids: list[str]
    group_ids: list[str | None]
    prompts: list[list[int] | None]
    """[S] token ids of each prompt."""
    versions: np.ndarray
    """[S] policy version of the sampling weights; NaN where unknown."""
    settings: dict[str, np.ndarray]
    """Sampling setting -> [S] values, NaN where unknown."""

    @cached_property
    def num_sequences(self) -> int:
        return len(self.seq_ids)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[S] response tokens."""
        return np.diff(self.starts)

    @cached_property
    def seq(self) -> np.ndarray:
        """[N] number of the sequence."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """[N] place in the response, from 0."""
        return np.asarray(np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths))

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        """[S] prompt tokens; 0 where unknown."""
        return np.array([0 if prompt is None else len(prompt) for prompt in self.prompts])

    @cached_property
    def d(self) -> np.ndarray:
        """[N] logprob(a) - logprob(b), nats; NaN where one is missing or not finite."""
        with np.errstate(invalid="ignore"):
            d = self.a.logprobs - self.b.logprobs
        return np.where(np.isfinite(d), d, np.nan)

    @cached_property
    def compared(self) -> np.ndarray:
        """[N] bool: counts in the loss and has a finite logprob in both."""
        return np.asarray(self.mask & np.isfinite(self.d))

    @property
    def prefix_keys(self) -> np.ndarray:
        """[N] a number for the prompt and the response before each token; equal for equal ones."""
        return self._keys[0]

    @property
    def token_keys(self) -> np.ndarray:
        """[N] a number for the prompt and the response up to and with each token; equal for equal ones."""
        return self._keys[1]

    @cached_property
    def _keys(self) -> tuple[np.ndarray, np.ndarray]:
        starts = [hash((0, row)) if prompt is None else hash(tuple(prompt)) for row, prompt in enumerate(self.prompts)]
        state = np.array(starts, np.int64).astype(np.uint64)
        before, after = np.empty(len(self.tokens), np.uint64), np.empty(len(self.tokens), np.uint64)
        factor, more, shift = np.uint64(6364136223846793005), np.uint64(1442695040888963407), np.uint64(29)
        ids = self.tokens.astype(np.uint64)
        for t in range(int(self.lengths.max(initial=0))):
            rows = np.flatnonzero(self.lengths > t)
            at = self.starts[rows] + t
            before[at] = state[rows]
            mixed = (state[rows] ^ (ids[at] + np.uint64(1))) * factor + more
            state[rows] = mixed ^ (mixed >> shift)
            after[at] = state[rows]
        return before, after


def read_sample(database: Database, pair: Pair, worst_steps: Sequence[int]) -> Sample:
    """Read steps spread over a run, the worst ones among them, up to a number of tokens."""
    steps = _chosen_steps(database, worst_steps)
    names = ", ".join(str(step) for step in steps)
    query = _QUERY.format(a=quoted(pair[0]), b=quoted(pair[1]), steps=names)
    return _of_table(_within(database.connection.sql(query).to_arrow_table()), pair)


_QUERY = """
    SELECT s.step, s.seq_id, s.group_id, s.prompt_ids, s.response_ids, s.response_mask, s.num_response_tokens,
           s.policy_version, s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens,
           a.logprobs AS logprobs_a, a.entropy AS entropy_a, a.policy_version AS version_a, a.contract AS contract_a,
           a.writer AS writer_a,
           b.logprobs AS logprobs_b, b.entropy AS entropy_b, b.policy_version AS version_b, b.contract AS contract_b,
           b.writer AS writer_b
    FROM sequences AS s
    JOIN scores AS a ON a.run = s.run AND a.step = s.step AND a.seq_id = s.seq_id
    JOIN scores AS b ON b.run = s.run AND b.step = s.step AND b.seq_id = s.seq_id
    WHERE a."pass" = {a} AND b."pass" = {b} AND a.iteration = 0 AND b.iteration = 0
      AND a.logprobs IS NOT NULL AND b.logprobs IS NOT NULL
      AND s.step IN ({steps}) AND a.step IN ({steps}) AND b.step IN ({steps})
    ORDER BY s.step, s.group_id, length(s.seq_id), s.seq_id
"""


def _chosen_steps(database: Database, worst: Sequence[int]) -> list[int]:
    """Steps in neighbouring pairs all over the run, so that one can be held against the next; and the worst ones."""
    query = "SELECT step, sum(num_response_tokens) FROM sequences GROUP BY step ORDER BY step"
    rows = database.connection.execute(query).fetchall()
    known, tokens = [step for step, _ in rows], sum(num for _, num in rows)
    most = int(np.clip(MAX_READ_TOKENS * len(known) / max(tokens, 1), MIN_SAMPLED_STEPS, MAX_SAMPLED_STEPS))
    if len(known) <= most:
        return known
    pairs = most // 2
    firsts = np.linspace(0, len(known) - 2, pairs).astype(int) if pairs > 1 else [(len(known) - 1) // 2]
    spread = {known[index + more] for index in firsts for more in (0, 1)}
    return sorted(spread | set(worst[:MAX_WORST_STEPS]))


def _within(table: pa.Table) -> pa.Table:
    """The first rows of every step, so many that MAX_SAMPLED_TOKENS are not passed."""
    tokens = table["num_response_tokens"].to_numpy()
    if tokens.sum() <= MAX_SAMPLED_TOKENS:
        return table
    steps = table["step"].to_numpy()
    kept = np.zeros(len(steps), bool)
    for step in np.unique(steps):
        rows = np.flatnonzero(steps == step)
        kept[rows[np.cumsum(tokens[rows]) <= MAX_SAMPLED_TOKENS // len(np.unique(steps))]] = True
    return table.filter(pa.array(kept))


def _of_table(table: pa.Table, pair: Pair) -> Sample:
    lengths = table["num_response_tokens"].to_numpy().astype(np.int64)
    masks = table["response_mask"].to_pylist()
    return Sample(
        a=_side(table, pair[0], "a", lengths),
        b=_side(table, pair[1], "b", lengths),
        tokens=_flat(table["response_ids"]).to_numpy(zero_copy_only=False),
        mask=np.concatenate(
            [np.ones(n, bool) if mask is None else np.array(mask, bool) for mask, n in zip(masks, lengths, strict=True)]
            or [np.empty(0, bool)]
        ),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        steps=table["step"].to_numpy(),
        seq_ids=table["seq_id"].to_pylist(),
        group_ids=table["group_id"].to_pylist(),
        prompts=table["prompt_ids"].to_pylist(),
        versions=_numbers(table["policy_version"]),
        settings={name: _numbers(table[name]) for name in SETTINGS},
    )


def _side(table: pa.Table, name: str, suffix: str, lengths: np.ndarray) -> Side:
    values = _flat(table[f"logprobs_{suffix}"])
    entropy = table[f"entropy_{suffix}"]
    return Side(
        name=name,
        logprobs=_numbers(values),
        is_null=values.is_null().to_numpy(zero_copy_only=False),
        entropy=None if entropy.null_count == len(entropy) else _with_holes(entropy, lengths),
        versions=_numbers(table[f"version_{suffix}"]),
        contracts=table[f"contract_{suffix}"].to_pylist(),
        writers=table[f"writer_{suffix}"].to_pylist(),
    )


def _flat(lists: pa.ChunkedArray) -> pa.Array:
    flat = pc.list_flatten(lists)
    return flat.combine_chunks() if isinstance(flat, pa.ChunkedArray) else flat


def _with_holes(lists: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray:
    """Lists of which some are NULL, as [N] with NaN for those."""
    out = np.full(int(lengths.sum()), np.nan)
    there = np.repeat(lists.is_valid().to_numpy(), lengths)
    out[there] = _numbers(_flat(lists))
    return out


def _numbers(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """float64, NaN for NULL."""
    return np.asarray(pc.fill_null(values.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False), np.float64)
