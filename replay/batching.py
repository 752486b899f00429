"""Arrange recorded rows in forward passes.

Shapes: B rows in a forward pass, W columns (the padded row length, or all tokens if rows are packed), K trailing
columns that cover every response, N response tokens in all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from ..schemas.errors import CannotReplay
from ..tracer.routing import Routing
from .backends.packing import Span
from .recorded import RecordedRow

LEFT, RIGHT, PACKED = "left", "right", "packed"
PACKED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Default token limits for packed forward passes, by device. A row that exceeds the limit runs alone."""
UNLABELLED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedRows:
    rows: tuple[RecordedRow, ...]
    ids_BW: np.ndarray
    """int64 token ids. The shape is [1, W] if rows are packed."""
    places_B: tuple[np.ndarray, ...]
    """For each row, the indices of its prompt and response tokens in the flattened `ids_BW`."""

    @property
    def width(self) -> int:
        return int(self.ids_BW.shape[1])

    @property
    def before_N(self) -> np.ndarray:
        """Indices (in the flattened `ids_BW`) of the tokens whose hidden states predict the response tokens."""
        pairs = zip(self.rows, self.places_B, strict=True)
        return np.concatenate([places[len(row.prompt_ids) - 1 : -1] for row, places in pairs])

    @property
    def scored_N(self) -> np.ndarray:
        pairs = zip(self.rows, self.places_B, strict=True)
        return np.concatenate([places[len(row.prompt_ids) :] for row, places in pairs])

    @property
    def places_N(self) -> np.ndarray:
        return np.concatenate(self.places_B)

    @property
    def tokens_BW(self) -> np.ndarray:
        tokens = np.zeros(self.ids_BW.size, bool)
        tokens[self.places_N] = True
        return tokens.reshape(self.ids_BW.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch(_PlacedRows):
    mask_BW: np.ndarray
    """int64 attention mask: 1 for visible tokens, else 0."""
    first_B: np.ndarray
    """For each row, the column where the response starts (int64)."""

    @property
    def num_kept(self) -> int:
        """K: number of trailing columns that cover every response token."""
        return int(self.width - self.first_B.min())

    def last(self, values_BK: Any) -> Any:
        rows_N, columns_N = np.divmod(self.scored_N, self.width)
        return values_BK[rows_N, columns_N - self.width]

    def padding(self) -> tuple[np.ndarray, np.ndarray]:
        left_B = self.first_B - [len(row.prompt_ids) for row in self.rows]
        return left_B, self.width - self.first_B - [len(row.response_ids) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(_PlacedRows):
    """Rows packed without padding, either end to end or as a prefix tree."""

    positions_W: np.ndarray
    spans: tuple[Span, ...]
    """Token ranges: rows, tree branches or trailing padding. Tokens attend to their own range and to its prefix."""

    @property
    def labels_W(self) -> np.ndarray:
        """Id of the next token at each position (int64), or UNLABELLED if the next token is not scored."""
        labels_W = np.full(self.width, UNLABELLED, np.int64)
        scored_N = np.concatenate([row.scored for row in self.rows])
        labels_W[self.before_N[scored_N]] = np.concatenate([row.response_ids for row in self.rows])[scored_N]
        return labels_W

    def padding(self) -> tuple[np.ndarray, np.ndarray]:
        after_B = np.zeros(len(self.rows), np.int64)
        after_B[-1] = np.count_nonzero(~self.tokens_BW)
        return np.zeros_like(after_B), after_B


ForwardBatch = PaddedBatch | PackedBatch


def cached_ends(batch: ForwardBatch, cached_tokens: int | None) -> list[int]:
    """Return the column boundaries of passes through a KV cache: the prompt, then chunks of `cached_tokens`."""
    if cached_tokens is None or isinstance(batch, PackedBatch):
        return [0, batch.width]
    prompt = batch.width - batch.num_kept
    return sorted({0, prompt, *range(prompt + cached_tokens, batch.width, cached_tokens), batch.width})


@dataclass(slots=True, kw_only=True)
class Scored:
    rows: list[RecordedRow] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    """Response logprobs [T] for each row (nats)."""
    batches: list[ForwardBatch] = field(default_factory=list)
    """Forward passes in the order they ran. Empty if the engine forms its own batches."""
    routing: list[Routing] = field(default_factory=list)
    """Experts chosen for each row. Empty if no routers were observed."""
    kept: np.ndarray | None = None
    """For each row in `rows`, its index among all rows in `batches`. None if no row was left out."""

    def only(self, names: Container[str]) -> Scored:
        kept = np.array([place for place, row in enumerate(self.rows) if row.seq_id in names], np.int64)
        return Scored(
            rows=[self.rows[place] for place in kept],
            logprobs=[self.logprobs[place] for place in kept],
            batches=self.batches,
            routing=[self.routing[place] for place in kept] if self.routing else [],
            kept=kept if self.kept is None else self.kept[kept],
        )

    def extend(self, part: Scored) -> None:
        self.rows.extend(part.rows)
        self.logprobs.extend(part.logprobs)
        self.batches.extend(part.batches)
        self.routing.extend(part.routing)


def responses(batch: ForwardBatch, values_N: np.ndarray) -> list[np.ndarray]:
    return np.split(values_N, np.cumsum([len(row.response_ids) for row in batch.rows])[:-1])


def forwards(
    rows: Sequence[RecordedRow], pad_id: int, *, batch_size: int | None = None, batch_tokens: int | None = None,
    padding: str = LEFT, device: str = "cpu",
) -> list[ForwardBatch]:  # fmt: skip
    """Group rows into the recorded forward passes, or into groups of `batch_size` rows in the recorded order.

    By default, rows keep the recorded padding. With `batch_tokens`, rows are sorted by length, and the number of tokens
    per forward pass (including padding) is limited. With `right` padding, each row starts at column 0. With `packed`,
    rows are placed end to end, and a forward pass contains up to `batch_size` rows or up to `batch_tokens` tokens
    (default: PACKED_TOKENS).
    """
    most = batch_tokens or PACKED_TOKENS[device]
    if padding == PACKED:
        longest_first = sorted(rows, key=lambda row: -row.num_tokens)  # so that rows of similar length run together

        def fits(group: list[RecordedRow]) -> bool:
            return sum(row.num_tokens for row in group) <= most if batch_size is None else len(group) <= batch_size

        return [packed_batch(group) for group in grouped(longest_first, fits)]
    if batch_tokens is not None:
        longest_first = sorted(rows, key=lambda row: (-row.num_tokens, -len(row.prompt_ids)))
        bounded = grouped(longest_first, lambda group: len(group) * _width(group, padding) <= most)
        return [_padded(group, pad_id, padding, is_tight=True) for group in bounded]
    groups = recorded_forwards(rows)
    if batch_size is not None:
        by_writer = [list(group) for _, group in groupby(rows, key=lambda row: row.writer)]
        groups = [part[i : i + batch_size] for part in by_writer for i in range(0, len(part), batch_size)]
    return [_padded(group, pad_id, padding) for group in groups]


def recorded_forwards(rows: Sequence[RecordedRow]) -> list[list[RecordedRow]]:
    return [list(group) for _, group in groupby(rows, key=lambda row: (row.writer, row.forward_id))]


def _padded(rows: Sequence[RecordedRow], pad_id: int, padding: str, *, is_tight: bool = False) -> PaddedBatch:
    before = max(row.pad_left + len(row.prompt_ids) for row in rows)
    width = before + max(len(row.response_ids) + row.pad_right for row in rows)
    if padding == RIGHT:
        width = max(row.pad_left + row.num_tokens + row.pad_right for row in rows)
    if is_tight:
        before = max(len(row.prompt_ids) for row in rows)
        width = _width(rows, padding)
    ids_BW = np.full((len(rows), width), pad_id, np.int64)
    mask_BW = np.zeros_like(ids_BW)
    first_B = np.zeros(len(rows), np.int64)
    for index, row in enumerate(rows):
        first_B[index] = before if padding == LEFT else len(row.prompt_ids)
        start = first_B[index] - len(row.prompt_ids)
        stop = first_B[index] + len(row.response_ids)
        ids_BW[index, start : first_B[index]] = row.prompt_ids
        ids_BW[index, first_B[index] : stop] = row.response_ids
        # Like the trainer, hide a response from attention if all its tokens are masked.
        mask_BW[index, start : stop if row.scored.any() or not len(row.scored) else first_B[index]] = 1
    places_B = tuple(
        np.arange(start - len(row.prompt_ids), start + len(row.response_ids))
        for start, row in zip((first_B + np.arange(len(rows)) * width).tolist(), rows, strict=True)
    )
    return PaddedBatch(rows=tuple(rows), ids_BW=ids_BW, places_B=places_B, mask_BW=mask_BW, first_B=first_B)


def grouped(rows: Iterable[RecordedRow], fits: Callable[[list[RecordedRow]], bool]) -> Iterator[list[RecordedRow]]:
    """Split rows, in order, into groups for which `fits` is true. A row that is too large runs alone."""
    group: list[RecordedRow] = []
    for row in rows:
        if group and not fits([*group, row]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _width(rows: Sequence[RecordedRow], padding: str) -> int:
    if padding == RIGHT:
        return max(row.num_tokens for row in rows)
    return max(len(row.prompt_ids) for row in rows) + max(len(row.response_ids) for row in rows)


def packed_batch(rows: Sequence[RecordedRow], *, num_pads: int = 0) -> PackedBatch:
    ids = [ids for row in rows for ids in (row.prompt_ids, row.response_ids)]
    ids_W = np.concatenate([*ids, np.zeros(num_pads, np.int64)]).astype(np.int64)
    ends = np.cumsum([row.num_tokens for row in rows]).tolist()
    return PackedBatch(
        rows=tuple(rows),
        ids_BW=ids_W[None],
        positions_W=np.concatenate([*(np.arange(row.num_tokens) for row in rows), np.arange(num_pads)]),
        places_B=tuple(np.arange(start, end) for start, end in pairwise([0, *ends])),
        spans=tuple(Span(start=start, end=end) for start, end in pairwise([0, *ends, *[len(ids_W)] * bool(num_pads)])),
    )


def check_tokens(rows: Sequence[RecordedRow], config: Mapping[str, Any]) -> None:
    vocab_size = int((config.get("text_config") or config).get("vocab_size", 1 << 31))
    for row in rows:
        if not len(row.prompt_ids):
            raise CannotReplay(
                f"sequence {row.seq_id!r} has an empty prompt, so nothing predicts its first response token"
            )
        for name, ids in (("prompt", row.prompt_ids), ("response", row.response_ids)):
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if len(wrong):
                raise CannotReplay(
                    f"sequence {row.seq_id!r}: token {wrong[0]} in the {name} is outside the model's vocabulary "
                    f"({vocab_size:,} tokens); check that this is the model that was trained"
                )
