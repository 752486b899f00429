"""Read the logprobs of all passes, and hand them out in blocks of tokens.

Shapes: P passes, C passes in a block, R sequences, T tokens in all sequences, B tokens in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas.errors import QueryFailed
from ...schemas.passes import REPLAY_PREFIX
from ...tracer.store import too_large
from ..trace.database import Database

_SEQUENCES = "SELECT step, seq_id, coalesce(group_id, seq_id), num_response_tokens FROM sequences ORDER BY step, seq_id"
_SCORES = f"""
SELECT "pass", number, start, logprobs FROM scores JOIN (
    SELECT step, seq_id, num_response_tokens AS num, row_number() OVER sorted - 1 AS number,
        CAST(sum(num_response_tokens) OVER sorted AS BIGINT) - num_response_tokens AS start
    FROM sequences WINDOW sorted AS (ORDER BY step, seq_id)
) USING (step, seq_id)
WHERE iteration = 0 AND len(logprobs) = num AND NOT starts_with("pass", '{REPLAY_PREFIX}')
"""
_NUM_PASSES = f'SELECT count(DISTINCT "pass") FROM scores WHERE NOT starts_with("pass", \'{REPLAY_PREFIX}\')'
CELLS = 1 << 20
"""Maximum number of values in a block."""
BYTES_PER_TOKEN = 33
"""Memory that a comparison needs per token, besides 4 bytes per pass (bytes). It holds the classes' median and three
copies of one class's differences, all float64."""
_MISSING = np.uint32(0x7FEDCBA9)
"""Bits of a NaN that stands for a missing value."""


@dataclass(frozen=True, slots=True)
class Block:
    start: int
    bits_CB: np.ndarray
    """uint32 bits of the float32 logprobs."""
    known_CB: np.ndarray

    @property
    def values_CB(self) -> np.ndarray:
        """float64 logprobs, with NaN for missing and infinite values."""
        values_CB = self.bits_CB.view(np.float32).astype(np.float64)
        values_CB[np.isinf(values_CB)] = np.nan
        return values_CB


class PassValues:
    """Logprobs by pass and token. Raises QueryFailed if this machine's memory is too small."""

    def __init__(self, database: Database):
        self.rows: list[tuple[int, str, str, int]] = database.connection.execute(_SEQUENCES).fetchall()
        """[R] step, seq_id, prompt and number of tokens."""
        self.starts = np.cumsum([0, *(row[3] for row in self.rows)])
        """[R + 1] first token of each sequence."""
        self.num_tokens = int(self.starts[-1])
        ((num_passes,),) = database.connection.execute(_NUM_PASSES).fetchall()
        bytes_per_token = BYTES_PER_TOKEN + 4 * num_passes
        if too_large(self.num_tokens, bytes_per_token) is not None:
            raise QueryFailed(
                f"{database.given[0]}: comparing {self.num_tokens:,} response tokens takes "
                f"{bytes_per_token * self.num_tokens:,} bytes of memory, more than this machine has. Compare fewer steps"
            )
        self._bits: dict[str, np.ndarray] = {}
        """Pass -> [T] uint32 bits of the float32 logprobs."""
        self.has: dict[str, np.ndarray] = {}
        """Pass -> [R] bool: sequences with any value."""
        for batch in database.connection.batches(_SCORES, 128):
            self._add(*batch.columns)
        self.has = {name: has for name, has in sorted(self.has.items()) if has.any()}

    def _add(self, names: pa.Array, rows: pa.Array, starts: pa.Array, lists: pa.Array) -> None:
        flat = lists.flatten()
        known = flat.is_valid().to_numpy(zero_copy_only=False)
        bits = flat.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float32).view(np.uint32)
        # A logprob with the bits that stand for a missing value becomes another NaN.
        stored = np.where(known, np.where(bits == _MISSING, bits ^ np.uint32(1), bits), _MISSING)
        ends = np.cumsum(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
        places = (each.to_pylist() for each in (names, rows, starts))
        for name, row, start, end, num in zip(*places, ends, np.diff(ends, prepend=0), strict=True):
            if name not in self.has:
                self._bits[name] = np.full(self.num_tokens, _MISSING)
                self.has[name] = np.zeros(len(self.rows), bool)
            self.has[name][row] |= known[end - num : end].any()
            self._bits[name][start : start + num] = stored[end - num : end]

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Yield the passes' values at all tokens, in blocks of consecutive tokens."""
        most = max(CELLS // len(names), 1)
        for start in range(0, self.num_tokens, most):
            yield self._read(names, start, min(most, self.num_tokens - start))

    def at(self, names: Sequence[str], token: int) -> np.ndarray:
        """Return the passes' logprobs at one token, [C]."""
        return self._read(names, token, 1).values_CB[:, 0]

    def _read(self, names: Sequence[str], start: int, num: int) -> Block:
        bits_CB = np.stack([self._bits[name][start : start + num] for name in names])
        return Block(start, bits_CB, bits_CB != _MISSING)

    def digest(self, name: str) -> bytes:
        found = sha256()
        for block in self.blocks([name]):
            found.update(block.bits_CB.tobytes())
        return found.digest()

    def place(self, token: int) -> tuple[str, int]:
        """Return a token's seq_id and its index in that sequence."""
        row = int(np.searchsorted(self.starts, token, side="right")) - 1
        return self.rows[row][1], token - int(self.starts[row])

    def extend(self, ends_R: np.ndarray, tokens: np.ndarray) -> None:
        """Increase the end offsets `ends_R` where needed, so that all `tokens` lie before their sequences' ends."""
        rows = np.searchsorted(self.starts, tokens, side="right") - 1
        np.maximum.at(ends_R, rows, tokens + 1 - self.starts[rows])
