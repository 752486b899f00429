"""Read the input for a check: sums over all tokens in two passes, and a sample of tokens to inspect one by one.

Shapes: N sampled tokens in S sequences, concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas.passes import ROLLOUT
from ...schemas.tables import SAMPLING
from ...tracer.arrow_arrays import number_array
from ..trace.columns import sequence_columns
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.pair_sums import COUNTS, SUM_EXP_ABS_D, finite, pair_sums
from ..trace.ragged import array_of, counted, fitted, flat
from ..trace.source import Pair
from ..trace.sums import ensure
from ..trace.tokens import PassRows, neighbouring_pairs, token_query, tokens_by_step, tokens_of_rows

MAX_SAMPLED_STEPS = 16
"""Maximum number of steps from which tokens are read: enough to tell a constant mismatch from a trend."""
MAX_READ_TOKENS = 2_000_000
"""Approximate limit on tokens read from disk. Two whole neighbouring steps are read even if they have more tokens."""
MAX_SAMPLED_TOKENS = 100_000
"""Maximum number of tokens to inspect one by one. If a fault affects 0.1% of all tokens, about 100 are inspected."""
UNSAMPLED_NATS = -3.0
"""Logprob + entropy (nats) below which a token is unlikely. At most 5% of sampled tokens are below it."""
MIN_UNSAMPLED_RUN = 4
"""Minimum number of consecutive unlikely tokens that count as not sampled. In healthy runs, under 2% of rows reach it."""
CHANCE = np.log(1e-6)
"""Log probability below which chance does not explain a pattern."""
NEEDED_SUMS = (*COUNTS, "sum_d2")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSums:
    steps: np.ndarray
    columns: dict[str, np.ndarray]
    """Sum name -> [R] values, one per sequence. 0 for sequences without a finite logprob in both passes."""

    @property
    def num_tokens(self) -> int:
        return int(self.columns["num_tokens"].sum())

    @property
    def num_not_finite(self) -> int:
        return int(self.columns["num_nan"].sum() + self.columns["num_inf"].sum())

    @property
    def rms_d(self) -> float:
        return float(np.sqrt(np.sort(self.columns["sum_d2"]).sum() / max(self.num_tokens, 1)))

    @property
    def worst_steps(self) -> list[int]:
        """The step with the largest mean squared d, and the step with the most missing or non-finite logprobs."""
        steps, place = np.unique(self.steps, return_inverse=True)
        of_step = {name: np.bincount(place, values) for name, values in self.columns.items()}
        squares = of_step["sum_d2"] / np.maximum(of_step["num_tokens"], 1)
        lost = of_step["num_nan"] + of_step["num_inf"] + of_step["num_null"]
        return [int(steps[values.argmax()]) for values in (squares, lost) if values.any()]


def read_pair_sums(database: Database, pair: Pair, names: tuple[str, ...] = NEEDED_SUMS) -> PairSums:
    """Read the sums stored in the trace, or compute them from the tokens. With Ray, missing sums are stored first. `names`
    is NEEDED_SUMS, optionally followed by other columns of schemas.sums or SUM_EXP_ABS_D, which no trace stores."""
    if database.ray is not None:
        ensure(database, pair, of_run=False, progress=database.progress)
    has_mask = sequence_columns(database).mask
    if database.sums.covers(pair) and SUM_EXP_ABS_D not in names:
        counted = "list_sum(response_mask::INTEGER[])" if has_mask else "NULL"
        query = (
            f"SELECT step, {', '.join(f'coalesce(sums.{name}, 0) AS {name}' for name in names)}, "
            f"greatest(coalesce({counted}, num_response_tokens) - {' - '.join(COUNTS)}, 0) AS num_null "
            f"FROM sequence_sums AS sums JOIN sequences USING (run, step, seq_id) WHERE pass_a = {quoted(pair[0])} "
            f"AND pass_b = {quoted(pair[1])} AND iteration_a = 0 AND iteration_b = 0"
        )
        columns = {name: np.asarray(values) for name, values in database.connection.execute(query).fetchnumpy().items()}
    else:
        passes = {"a": PassRows(name=pair[0]), "b": PassRows(name=pair[1])}
        query = token_query(passes, ["a.step"], lists=["mask"] if has_mask else [])
        parts = []
        with database.progress("reading tokens", sum(tokens_by_step(database).values())) as advance:
            for part in database.connection.mapped_batches(query, partial(_sums_of_rows, names)):
                advance(int(part.pop("length").sum()))
                parts.append(part)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return PairSums(steps=columns.pop("step"), columns=columns)


def _sums_of_rows(names: tuple[str, ...], rows: pa.RecordBatch) -> dict[str, np.ndarray]:
    tokens = tokens_of_rows(rows, ("a", "b"))
    sums = pair_sums(finite(tokens), names)
    mask_T = counted(rows.column("mask"), tokens.lengths_N) if "mask" in rows.schema.names else None
    counted_N = tokens.lengths_N if mask_T is None else np.bincount(tokens.sequence_T, mask_T, len(tokens.lengths_N))
    sums["num_null"] = counted_N - sum(sums[name] for name in COUNTS)
    return {"step": array_of(rows.column("step")), "length": tokens.lengths_N, **sums}


@dataclass(kw_only=True)
class PassSample:
    name: str
    logprobs: np.ndarray
    """[N] float64 (nats). NaN where missing."""
    is_null: np.ndarray
    """[N] bool: True where no logprob was recorded."""
    entropy: np.ndarray | None
    """[N] float64 (nats), NaN where missing. None if no entropy is finite, or if they belong to other tokens."""
    share_lost: float
    """Share of the loss tokens' recorded entropies that are not finite, or impossible given the token's logprob."""
    versions: np.ma.MaskedArray
    """[S] int64 policy version of the scoring weights. Masked where unknown."""
    contracts: list[str | None]
    """[S] contract hashes. None where unknown."""
    writers: list[str]
    """[S] name of the recording process."""
    forward_row: np.ndarray
    """[S] row index in the batch of the forward pass. NaN where unknown."""
    pad_left: np.ndarray
    """[S] number of padding tokens before the prompt in the forward pass. NaN where unknown."""


@dataclass(kw_only=True)
class Sample:
    a: PassSample
    b: PassSample
    tokens: np.ndarray
    mask: np.ndarray
    """[N] bool: tokens in the loss."""
    starts: np.ndarray
    """[S + 1] offset of each sequence's first token, then N."""
    steps: np.ndarray
    seq_ids: list[str]
    group_ids: list[str | None]
    prompts: list[list[int] | None]
    """[S] prompt token ids. None where unknown."""
    versions: np.ma.MaskedArray
    """[S] int64 policy version of the sampling weights. Masked where unknown."""
    settings: dict[str, np.ndarray]
    """Sampling setting -> [S] values, NaN where unknown."""
    outcomes: dict[str, np.ndarray]
    """`reward` and `advantage` -> [S] values, NaN where unknown."""
    finish_reasons: list[str | None]
    """[S] why sampling ended. None where unknown."""

    @cached_property
    def ended(self) -> np.ndarray:
        """[S] finish reasons in lower case. Empty where unknown."""
        return in_lower_case(self.finish_reasons)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_ids)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[S] number of response tokens."""
        return np.diff(self.starts)

    @cached_property
    def seq(self) -> np.ndarray:
        """[N] index of each token's sequence."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """[N] position in the response, from 0."""
        return np.asarray(np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths))

    @cached_property
    def previous(self) -> np.ndarray:
        """[N] int64 id of the preceding response token. -1 for the first."""
        return np.where(self.position > 0, np.r_[-1, self.tokens[:-1].astype(np.int64)], -1)

    @cached_property
    def bigrams(self) -> np.ndarray:
        """[N] int64 key for each token's id together with the preceding token's id."""
        return np.asarray((self.previous + 1) * (int(self.tokens.max(initial=0)) + 1) + self.tokens)

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        """[S] number of prompt tokens. 0 where unknown."""
        return np.array([0 if prompt is None else len(prompt) for prompt in self.prompts])

    @cached_property
    def d(self) -> np.ndarray:
        """[N] logprob(a) - logprob(b) (nats). NaN where either is missing or not finite."""
        with np.errstate(invalid="ignore"):
            d = self.a.logprobs - self.b.logprobs
        return np.where(np.isfinite(d), d, np.nan)

    @cached_property
    def compared(self) -> np.ndarray:
        """[N] bool: tokens in the loss with finite logprobs in both passes."""
        return np.asarray(self.mask & np.isfinite(self.d))

    @cached_property
    def prefix_keys(self) -> np.ndarray:
        """[N] hash of the prompt and the preceding response tokens."""
        starts = [hash((0, row)) if prompt is None else hash(tuple(prompt)) for row, prompt in enumerate(self.prompts)]
        keys = np.repeat(np.array(starts, np.int64).astype(np.uint64), self.lengths)
        for t in range(1, int(self.lengths.max(initial=0))):
            at = self.starts[:-1][self.lengths > t] + t
            keys[at] = _followed(keys[at - 1], self.tokens[at - 1])
        return keys

    @cached_property
    def token_keys(self) -> np.ndarray:
        """[N] hash of the prompt and the response up to and including each token."""
        return _followed(self.prefix_keys, self.tokens)


def _followed(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    mixed = (keys ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(6364136223846793005)
    mixed += np.uint64(1442695040888963407)
    return np.asarray(mixed ^ (mixed >> np.uint64(29)))


def run_lengths(flags: np.ndarray, seq: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Return the number of tokens, or of `counted` tokens, in each token's run of equal `flags` within its sequence, [N]."""
    run = np.cumsum(np.r_[True, (np.diff(flags) != 0) | (np.diff(seq) != 0)]) - 1
    return np.asarray(np.bincount(run, counted)[run])


def template_tokens(sample: Sample, side: PassSample) -> np.ndarray:
    """Return [N] bool: tokens in the loss that a chat template inserted, so `side` did not sample them. They have no
    logprob, adjoin tokens outside the loss that have none either, and share a few ids that are rare elsewhere."""
    null, ids = side.is_null, sample.tokens
    missing = sample.mask & null
    found = missing & (run_lengths(null, sample.seq, ~sample.mask) > 0)
    usual = (1 + (np.isin(ids, ids[found]) & ~null).sum()) / (1 + (~null).sum())
    cost = len(np.unique(ids[found])) * np.log(ids.max(initial=0) + 1)
    is_clear = found.sum() * np.log(usual) + cost < CHANCE and found.sum() > 0.95 * missing.sum()
    return np.asarray(found & (is_clear and side.name == ROLLOUT))


def ratio_in_bits(surprise: np.ndarray, entropy: np.ndarray) -> float:
    """Return mean(-logprob) / mean(entropy) if it is ln 2 at all entropy levels (entropy is in bits), otherwise 0."""
    parts = np.array_split(np.argsort(entropy, kind="stable"), 6)[2:]
    ratios = np.array([surprise[part].mean() / max(entropy[part].mean(), 1e-9) for part in parts])
    is_bits = (np.abs(ratios / np.log(2.0) - 1) < 0.12).all() and abs(np.median(ratios) / np.log(2.0) - 1) < 0.03
    return float(np.median(ratios)) if is_bits else 0.0


def in_lower_case(finish_reasons: Iterable[str | None]) -> np.ndarray:
    return np.array([str(reason or "").lower() for reason in finish_reasons], str)


_IMPOSSIBLE_NATS, _MOST_IMPOSSIBLE = 0.02, 0.01
"""Largest distance from the possible entropies, and largest share of tokens beyond it, that rounding can cause."""


def unscaled_ratio(sample: Sample, side: PassSample) -> tuple[float, float]:
    """Return mean(-logprob) / mean(entropy), and the share of tokens whose logprob rules out their entropy, if `side`'s
    entropies ignore the recorded temperature of unfiltered samples, otherwise zeros.

    The ratio is then below 1 at temperatures below 1, and above 1 otherwise. The same holds if the logprobs
    ignore it, too, or if a filter is not recorded, but then no logprob rules out its entropy.
    """
    recorded = {name: values[np.isfinite(values)] for name, values in sample.settings.items()}
    heat = recorded["temperature"]
    is_filtered = (recorded["top_p"] < 1).any() or (recorded["top_k"] > 0).any() or (recorded["min_p"] > 0).any()
    if side.entropy is None or not len(heat) or np.ptp(heat) or heat[0] in (0.0, 1.0) or is_filtered:
        return 0.0, 0.0
    there = sample.mask & np.isfinite(side.entropy) & np.isfinite(side.logprobs)
    if there.sum() < 400:
        return 0.0, 0.0
    logprobs, entropy, seq = side.logprobs[there], side.entropy[there], sample.seq[there]
    ratio = float(-logprobs.mean() / max(entropy.mean(), 1e-9))
    error = np.sqrt((np.bincount(seq, -logprobs - ratio * entropy) ** 2).sum()) / max(entropy.sum(), 1e-9)
    least, most = _possible_entropy(logprobs, 2 * int(sample.tokens.max(initial=1)) + 2)
    apart = entropy - 1.01 * most if heat[0] < 1 else 0.99 * least - entropy
    share = float(np.mean(apart > _IMPOSSIBLE_NATS))
    is_like = np.sign(ratio - 1) == np.sign(heat[0] - 1) and share > _MOST_IMPOSSIBLE
    return (ratio, share) if is_like and abs(ratio - 1) > max(0.1, 8 * error) else (0.0, 0.0)


def read_sample(database: Database, pair: Pair, worst_steps: Sequence[int]) -> Sample:
    """Read tokens from pairs of consecutive steps spread over the run, and from its worst steps."""
    tokens = tokens_by_step(database)
    most = int(np.clip(MAX_READ_TOKENS * len(tokens) / max(sum(tokens.values()), 1), 2, MAX_SAMPLED_STEPS))
    steps = list(tokens) if len(tokens) <= most else sorted({*neighbouring_pairs(list(tokens), most), *worst_steps})
    query = token_query(
        {"a": PassRows(name=pair[0]), "b": PassRows(name=pair[1])}, _ROWS, steps=steps, of_sequences=True,
        lists=["mask"], order=_ORDER, keys=_keys_within(database, pair, steps),
    )  # fmt: skip
    with database.following("reading a sample of steps"):
        table = database.connection.sql(query).to_arrow_table()
    return _of_table(_within(table), pair)


def logprobs_of(database: Database, name: str, sample: Sample, worst_steps: Sequence[int]) -> np.ndarray:
    """Return another pass's logprobs of the sample's tokens, [N] nats, NaN where missing."""
    other = read_sample(database, (sample.a.name, name), worst_steps)
    rows = zip(other.steps.tolist(), other.seq_ids, other.starts[:-1], other.starts[1:], strict=True)
    known = {(step, seq_id): other.b.logprobs[first:last] for step, seq_id, first, last in rows}
    own = zip(sample.steps.tolist(), sample.seq_ids, sample.lengths, strict=True)
    return np.concatenate([known.get((step, seq_id), np.full(length, np.nan)) for step, seq_id, length in own])


_OF_SEQUENCE = (
    "step", "seq_id", "group_id", "prompt_ids", "response_ids", "num_response_tokens", "policy_version", "reward", "advantage",
    "finish_reason", *SAMPLING,
)  # fmt: skip
_OF_PASS = ("entropy", "policy_version", "contract", "writer", "forward_row", "pad_left")
_ROWS = [
    *(f"s.{name}" for name in _OF_SEQUENCE),
    *(f"{side}.{name} AS {name}_{side}" for side in ("a", "b") for name in _OF_PASS),
]
_ORDER = "s.step, s.group_id, length(s.seq_id), s.seq_id"


def _keys_within(database: Database, pair: Pair, steps: list[int]) -> str:
    tokens = tokens_by_step(database)
    if sum(tokens[step] for step in steps) <= MAX_SAMPLED_TOKENS:
        return ""
    passes = {side: PassRows(name=name, scored=False, logprobs=False) for side, name in zip("ab", pair, strict=True)}
    columns = ["s.step", "s.seq_id", "s.num_response_tokens"]
    rows = database.connection.sql(token_query(passes, columns, steps=steps, of_sequences=True, order=_ORDER))
    names = _within(rows.to_arrow_table())["seq_id"].to_pylist()
    # With more than 1,000 sequence ids, reading whole steps is faster than filtering by id.
    return f"seq_id IN ({', '.join(map(quoted, names))})" if len(names) <= 1000 else ""


def _within(table: pa.Table) -> pa.Table:
    tokens = array_of(table["num_response_tokens"])
    if tokens.sum() <= MAX_SAMPLED_TOKENS:
        return table
    steps, first, place = np.unique(array_of(table["step"]), return_index=True, return_inverse=True)
    total = np.cumsum(tokens)
    kept = total - (total - tokens)[first][place] <= MAX_SAMPLED_TOKENS // len(steps)
    return table.filter(number_array(kept, pa.bool_()))


def _of_table(table: pa.Table, pair: Pair) -> Sample:
    tokens, ids = tokens_of_rows(table, ("a", "b")), array_of(flat(table["response_ids"])[0])
    lengths = array_of(table["num_response_tokens"]).astype(np.int64)
    counts, num_ids = counted(table["mask"], lengths), int(ids.max(initial=1)) + 1
    mask = np.ones(int(lengths.sum()), bool) if counts is None else counts
    return Sample(
        a=_side(table, pair[0], "a", tokens.logprobs["a"], mask, lengths, num_ids),
        b=_side(table, pair[1], "b", tokens.logprobs["b"], mask, lengths, num_ids), tokens=ids,
        mask=mask, starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), steps=array_of(table["step"]),
        seq_ids=table["seq_id"].to_pylist(), group_ids=table["group_id"].to_pylist(),
        prompts=table["prompt_ids"].to_pylist(), versions=_versions(table["policy_version"]),
        settings={name: _numbers(table[name]) for name in SAMPLING},
        outcomes={name: _numbers(table[name]) for name in ("reward", "advantage")},
        finish_reasons=table["finish_reason"].to_pylist(),
    )  # fmt: skip


MOST_LOST = 0.2
"""Maximum share of invalid entropies in a pass. Above it, they are reported as not belonging to its logprobs."""


def _side(
    table: pa.Table, name: str, side: str, logprobs: np.ndarray, mask: np.ndarray, lengths: np.ndarray, num_ids: int
) -> PassSample:
    column = table[f"entropy_{side}"]
    logprobs, entropy = logprobs.astype(np.float64), fitted(column, lengths).astype(np.float64)
    there = np.repeat(~array_of(column.is_null()), lengths) & np.isfinite(logprobs) & mask
    least, most = _possible_entropy(logprobs, 2 * num_ids)  # the vocabulary may be larger
    is_low, is_possible = entropy < 0.99 * least - _IMPOSSIBLE_NATS, entropy <= 1.01 * most + _IMPOSSIBLE_NATS
    share_lost = float(np.mean((is_low | ~is_possible)[there])) if there.any() else 0.0
    # If a token's logprob was lost, its entropy is too large. An entropy that is too small belongs to another token.
    is_known = np.isfinite(entropy[there]).any() and is_low[there].mean() <= MOST_LOST
    return PassSample(
        name=name, logprobs=logprobs, is_null=array_of(flat(table[side])[0].is_null()),
        entropy=entropy if is_known else None, share_lost=share_lost,
        versions=_versions(table[f"policy_version_{side}"]), contracts=table[f"contract_{side}"].to_pylist(),
        writers=table[f"writer_{side}"].to_pylist(), forward_row=_numbers(table[f"forward_row_{side}"]),
        pad_left=_numbers(table[f"pad_left_{side}"]),
    )  # fmt: skip


def _possible_entropy(logprobs: np.ndarray, num_ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each logprob, the smallest and the largest entropy (nats) that a distribution over `num_ids` ids can
    have if one id has this logprob: the remaining probability belongs to one other id, or equally to all."""
    p = np.exp(np.minimum(logprobs, 0.0))
    rest = np.maximum(1 - p, 1e-12)
    least = -p * np.log(np.maximum(p, 1e-300)) - rest * np.log(rest)
    return least, least + rest * np.log(num_ids)


def _versions(values: pa.ChunkedArray) -> np.ma.MaskedArray:
    # Fill NULLs from an array of zeros, because passing a Python scalar to Arrow would import pandas.
    known = pc.coalesce(values, number_array(np.zeros(len(values)), values.type))
    return np.ma.MaskedArray(array_of(known), mask=array_of(values.is_null()))  # type: ignore[no-untyped-call]


def _numbers(values: pa.ChunkedArray) -> np.ndarray:
    return array_of(values.cast(pa.float64()))
