"""Copy the logprobs of all passes to a temporary file, so that a comparison can read them in blocks of tokens.

Shapes: P passes, C passes in a block, R sequences, T tokens in all sequences, B tokens in a block.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO

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
CELLS = 1 << 20
"""Maximum number of values in a block."""
BYTES_PER_TOKEN = 33
"""Memory per token in a comparison (bytes): the median of all classes and three copies of one class's differences, in
float64."""
_MISSING = np.uint32(0x7FEDCBA9)
"""Bits of a NaN that stands for a missing value. The file stores bits ^ _MISSING, so that unwritten parts, which read
as 0, count as missing."""


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
    """Logprobs by pass and token. Memory does not grow with the number of passes.

    Raises QueryFailed if this machine's memory, or the temporary folder, is too small.
    """

    def __init__(self, database: Database, file: FileIO):
        self.rows: list[tuple[int, str, str, int]] = database.connection.execute(_SEQUENCES).fetchall()
        """Step, seq_id, prompt and number of tokens of each sequence [R]."""
        self.starts = np.cumsum([0, *(row[3] for row in self.rows)])
        """[R + 1] first token of each sequence."""
        self.num_tokens = int(self.starts[-1])
        if too_large(self.num_tokens, BYTES_PER_TOKEN) is not None:
            raise QueryFailed(
                f"{database.given[0]}: comparing {self.num_tokens:,} response tokens takes "
                f"{BYTES_PER_TOKEN * self.num_tokens:,} bytes of memory, more than this machine has. Compare fewer steps"
            )
        self._file = file
        self._slots: dict[str, int] = {}
        self.has: dict[str, np.ndarray] = {}
        """Pass -> [R] bool: sequences with any value."""
        try:
            for batch in database.connection.batches(_SCORES, 128):
                self._write(*batch.columns)
            file.truncate(4 * self.num_tokens * len(self._slots))
        except OSError as error:
            raise QueryFailed(
                f"{database.given[0]}: a temporary file with 4 bytes per token and pass could not be written "
                f"({error.strerror}). Set TMPDIR to a folder with more space, or compare fewer steps"
            ) from error
        self.has = {name: has for name, has in sorted(self.has.items()) if has.any()}

    def _write(self, names: pa.Array, rows: pa.Array, starts: pa.Array, lists: pa.Array) -> None:
        flat = lists.flatten()
        known = flat.is_valid().to_numpy(zero_copy_only=False)
        bits = flat.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float32).view(np.uint32) ^ _MISSING
        stored = np.where(known, np.where(bits == 0, np.uint32(1), bits), np.uint32(0))
        ends = np.cumsum(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
        places = (each.to_pylist() for each in (names, rows, starts))
        for name, row, start, end, num in zip(*places, ends, np.diff(ends, prepend=0), strict=True):
            slot = self._slots.setdefault(name, len(self._slots))
            if name not in self.has:
                self.has[name] = np.zeros(len(self.rows), bool)
            self.has[name][row] |= known[end - num : end].any()
            self._file.seek(4 * (slot * self.num_tokens + start))
            if self._file.write(stored[end - num : end].data) < 4 * num:
                raise OSError(errno.ENOSPC, "no space left")

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Yield the passes' values at all tokens, in blocks of consecutive tokens."""
        most = max(CELLS // len(names), 1)
        for start in range(0, self.num_tokens, most):
            yield self._read(names, start, min(most, self.num_tokens - start))

    def at(self, names: Sequence[str], token: int) -> np.ndarray:
        """Return the passes' logprobs at one token, [C]."""
        return self._read(names, token, 1).values_CB[:, 0]

    def _read(self, names: Sequence[str], start: int, num: int) -> Block:
        stored = np.empty((len(names), num), np.uint32)
        for name, values in zip(names, stored, strict=True):
            self._file.seek(4 * (self._slots[name] * self.num_tokens + start))
            self._file.readinto(values.data)
        return Block(start, stored ^ _MISSING, stored != 0)

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
