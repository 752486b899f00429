"""Read chosen sequences token by token: the worst, typical and random ones, and each step's worst.

Shapes: T response tokens shown, R tokens in the response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.passes import CURRENT, REFERENCE
from ..trace.columns import passes_with
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.ragged import array_of
from ..trace.source import Pair
from ..trace.tokens import PassRows, token_query
from .choice import PROMPT_TOKENS, Wanted, choice_text, choose, look_at, read_sequence_mismatch
from .token_text import TokenText, read_token_text

_BATCH_ROWS = 16
"""Maximum number of complete sequences in memory at once."""


def _rows(database: Database, run: str, keys: list[tuple[int, str]], passes: Sequence[str]) -> Iterator[dict[str, Any]]:
    connection = database.connection
    steps, seq_ids = zip(*keys, strict=True)
    connection.register("excerpt_keys", pa.table({"step": pa.array(steps, pa.int64()), "seq_id": pa.array(seq_ids)}))
    try:
        for batch in connection.batches(_query(run, keys, passes), _BATCH_ROWS):
            for number in range(batch.num_rows):
                row = {name: batch.column(name)[number] for name in batch.schema.names}
                yield {name: v.values if isinstance(v, pa.ListScalar) else v.as_py() for name, v in row.items()}
    finally:
        connection.unregister("excerpt_keys")


_SCALARS = (
    "step", "seq_id", "group_id", "policy_version", "num_prompt_tokens", "reward", "advantage", "finish_reason",
)  # fmt: skip
_OWN = (*_SCALARS, "prompt_ids", "response_ids", "response_mask", "advantages")


def _query(run: str, keys: list[tuple[int, str]], passes: Sequence[str]) -> str:
    # Write the keys as literals, because DuckDB pushes these down to the file scan and does not decode other rows.
    names = ", ".join(quoted(seq_id) for seq_id in sorted({seq_id for _, seq_id in keys}))
    read = {f"p{number}": name for number, name in enumerate(passes)}
    return token_query(
        {key: PassRows(name=name, scored=False, optional=True) for key, name in read.items()},
        [*(f"s.{name}" for name in _OWN), *(f"{key}.entropy AS entropy_{key}" for key in read)],
        run=run, steps=sorted({step for step, _ in keys}), of_sequences=True,
        keys=f"seq_id IN ({names}) AND (step, seq_id) IN (SELECT (step, seq_id) FROM excerpt_keys)",
    )  # fmt: skip


def _sample(
    row: Mapping[str, Any], passes: Sequence[str], why: tuple[str, ...], pair: Pair, text: TokenText, most: int
) -> TokenSample:
    ids_R = array_of(row["response_ids"])
    mask_R = _mask(row["response_mask"], len(ids_R))
    sides = {name: _side(row[f"p{number}"], len(ids_R)) for number, name in enumerate(passes)}
    entropies = {name: row[f"entropy_p{number}"] for number, name in enumerate(passes)}
    entropy = next((entropies[name] for name in pair[::-1] if entropies.get(name) is not None), None)
    d_R = _d(mask_R, *(sides[name][0] if name in sides else np.full(len(ids_R), np.nan) for name in pair))
    size_R = np.abs(d_R[np.isfinite(d_R)])
    first = _first(d_R, most)
    shown = slice(first, first + most)

    def cut(values: pa.Array | None) -> np.ndarray | None:
        return None if values is None else _side(values, len(ids_R))[0][shown].copy()

    ids = ids_R[shown].astype(np.int32)
    return TokenSample(
        why=why, num_tokens=len(ids_R), first_token=first, sum_d=float(np.nansum(d_R)) if len(size_R) else None,
        mean_abs_d=float(size_R.mean()) if len(size_R) else None, max_abs_d=float(size_R.max()) if len(size_R) else None,
        prompt=_prompt(row["prompt_ids"], text), ids=ids, texts=text.of(ids.tolist()),
        logprobs={name: logprobs[shown].copy() for name, (logprobs, _) in sides.items()},
        state={name: state[shown].copy() for name, (_, state) in sides.items()}, mask=mask_R[shown].copy(),
        advantages=cut(row["advantages"]), entropy=cut(entropy), **{name: row[name] for name in _SCALARS},
    )  # fmt: skip


def _d(mask_R: np.ndarray, a_R: np.ndarray, b_R: np.ndarray) -> np.ndarray:
    there_R = mask_R & np.isfinite(a_R) & np.isfinite(b_R)
    a_R, b_R = (np.where(there_R, side_R.astype(np.float64), 0.0) for side_R in (a_R, b_R))
    return np.where(there_R, a_R - b_R, np.nan)


def _first(d_R: np.ndarray, most: int) -> int:
    if len(d_R) <= most or not np.isfinite(d_R).any():
        return 0
    return int(np.clip(np.nanargmax(np.abs(d_R)) - most // 2, 0, len(d_R) - most))


def _side(values: pa.Array | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    state = np.full(length, NOT_RECORDED, np.int8)
    if values is None:
        return np.full(length, np.nan, np.float32), state
    out, valid = _of_length(values, length, np.float32(np.nan)), _of_length(values.is_valid(), length, False)
    state[valid] = np.select([np.isfinite(out), np.isnan(out)], [FINITE, NAN], INFINITE)[valid]
    return out, state


def _mask(values: pa.Array | None, length: int) -> np.ndarray:
    return _of_length(values.fill_null(False), length, False) if values else np.ones(length, bool)


def _of_length(values: pa.Array, length: int, missing: float | np.float32) -> np.ndarray:
    out = np.full(length, missing)
    out[: len(values)] = array_of(values)[:length]
    return out


def _prompt(values: pa.Array | None, text: TokenText) -> tuple[tuple[int, str], ...]:
    if values is None:
        return ()
    ids = values[max(len(values) - PROMPT_TOKENS, 0) :].to_pylist()
    return tuple(zip(ids, text.of(ids), strict=True))


_WANTED = Wanted()


def read_token_samples(
    database: Database, pair: Pair = ("train", "rollout"), *, notable: Sequence[int] = (), wanted: Wanted = _WANTED
) -> TokenSamples:
    """Choose sequences of a run, and read their tokens with d = logprob(a) - logprob(b) (nats).

    The worst sequences are those with the largest |d| in any token, and the typical sequences those whose mean |d| is
    closest to the median. The random sequences are the same in every call. Each step's worst sequences are added. In a
    large run, only some steps are searched (see choice.look_at), starting with the `notable` steps. Some sequences are
    omitted to limit the number of tokens shown, and long responses are cut to a window around their worst token. The
    result's `choice` describes the selection.

    If the trace has only one pass of the pair, d is missing. An empty trace has no sequences. Raises DamagedTrace.
    """
    source = database.sources[0]
    names = list(dict.fromkeys([*pair, CURRENT, REFERENCE]))
    there = passes_with(database, "seq_id", source.run, of=names, first_use=True)
    scored = [name for name in names if name in there]
    lacking = tuple(name for name in pair if name not in scored)
    looked = look_at(database, pair, source.run, notable, wanted.worst)
    gaps = read_sequence_mismatch(database, pair, source.run, looked.steps)
    choice = choose(gaps, looked, wanted)
    text = read_token_text(source)
    place = {(int(gaps.steps[row]), gaps.seq_ids[row]): row for row in choice.why}
    found: dict[int, TokenSample] = {}
    for row in _rows(database, source.run, [*place], scored) if place else ():
        number = place[row["step"], row["seq_id"]]
        sample = _sample(row, scored, choice.why[number], pair, text, wanted.max_sequence_tokens)
        found.setdefault(number, sample)
    return TokenSamples(
        sequences=tuple(found[number] for number in choice.why), passes=tuple(scored), text_from=text.told,
        choice=choice_text(choice, gaps, looked, wanted, pair, lacking),
    )  # fmt: skip


FINITE, NOT_RECORDED, NAN, INFINITE = 0, 1, 2, 3
"""States of a token's logprob in a pass. NOT_RECORDED means that the logprob is NULL or that the sequence has no row in
`scores`. INFINITE means plus or minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """A chosen sequence: its identity, the mismatch between two passes, and its tokens.

    d = logprob(a) - logprob(b) (nats). Sums are over response tokens that count toward the loss and have finite
    logprobs in both passes. Scores are from the first inner iteration. Token texts have passed through `visible`, but
    are not escaped for HTML.
    """

    step: int
    seq_id: str
    group_id: str | None
    why: tuple[str, ...]
    """One or more of WORST, TYPICAL, RANDOM and WORST_OF_STEP."""
    num_tokens: int
    first_token: int
    reward: float | None
    advantage: float | None
    """The response's advantage. None if not recorded, or if recorded per token."""
    policy_version: int | None
    """Optimizer updates applied to the sampling weights, or None if not recorded."""
    finish_reason: str | None
    sum_d: float | None
    """`sum_d`, `mean_abs_d` and `max_abs_d` are in nats, or None if no token can be compared."""
    mean_abs_d: float | None
    max_abs_d: float | None
    prompt: tuple[tuple[int, str], ...]
    num_prompt_tokens: int | None
    ids: np.ndarray
    texts: list[str]
    logprobs: Mapping[str, np.ndarray]
    """Logprobs [T] by pass, float32 (nats), as recorded. NaN if missing."""
    state: Mapping[str, np.ndarray]
    """State of each logprob [T] by pass, int8: FINITE, NOT_RECORDED, NAN or INFINITE."""
    mask: np.ndarray
    """[T] bool: True if the loss counts the token, False for tool output and masked parts."""
    advantages: np.ndarray | None
    """Advantages [T], float32, if recorded per token, otherwise None; see `advantage`."""
    entropy: np.ndarray | None
    """Entropies [T], float32 (nats), from pass b, or from pass a if b has none. NaN if missing, None if neither
    pass has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamples:
    sequences: tuple[TokenSample, ...]
    """The worst, typical and random sequences, then each step's worst."""
    choice: str
    """Sentences about the searched steps and the meaning of the reasons in `why`."""
    text_from: str
    """A sentence that names the tokenizer, or says why only ids are shown."""
    passes: tuple[str, ...]
