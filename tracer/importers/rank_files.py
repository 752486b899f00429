"""Join the files of train dumps that have one file per rank into samples.

Tensor-parallel ranks repeat the same data, data-parallel ranks hold different samples, and context-parallel ranks hold
different tokens from the same samples. In the zig-zag layout, rank r out of c holds chunks r and 2c-1-r out of 2c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .fields import Values
from .format import Reading
from .pickles import Budget, Foreign
from .slime import named_fields, response_of, sample_cells, top_level, values_of


def zig_zag(total: int, length: int, rank: int, size: int, chunk: int | None = None) -> list[tuple[int, int]]:
    """Return the two response token ranges [start, end) held by a context-parallel rank.

    `total` counts prompt and response tokens, `length` only response tokens. Logits at position p predict token p + 1.

    >>> zig_zag(12, 10, 0, 2), zig_zag(12, 10, 1, 2)
    ([(0, 2), (8, 10)], [(2, 5), (5, 8)])
    """
    first = total - length - 1
    chunk = -(-total // (2 * size)) if chunk is None else chunk
    found = []
    for place in (rank, 2 * size - 1 - rank):
        start, end = max(place * chunk, first), min((place + 1) * chunk, total - 1)
        found.append((max(start - first, 0), max(end - first, 0)) if end > start else (0, 0))
    return found


class Ranks:
    """Samples of one step, collected rank by rank."""

    def __init__(self, reading: Reading, budget: Budget):
        self._reading, self._budget = reading, budget
        self._samples: dict[str, _Sample] = {}
        self._size = 1

    def add(self, record: Mapping[str, Any], where: str) -> None:
        """Add a rank's samples, leaving out raw_reward, which covers the whole batch."""
        data = top_level(record.get("rollout_data"), where)
        tokens = data.get("tokens")
        if not isinstance(tokens, (list, tuple)):
            raise ImportFailed(f"{where} has no list of tokens")
        rank, size = _number(record, "cp_rank", 0, where), _number(record, "cp_size", 1, where)
        if not 0 <= rank < size <= 4096:
            raise ImportFailed(f"{where} has context-parallel rank {rank}, but only {size} ranks")
        self._size = max(self._size, size)
        listed = {
            name: value
            for name, value in data.items()
            if isinstance(value, (list, tuple)) and len(value) == len(tokens)
        }
        foreign = {name: value for name, value in data.items() if isinstance(value, Foreign)}
        samples = (foreign | {name: value[place] for name, value in listed.items()} for place in range(len(tokens)))
        widths = listed.get("max_seq_lens") if record.get("qkv_format") == "bshd" else None
        for place, (name, each) in enumerate(named_fields(self._reading, samples, where, self._budget)):
            prompt, response = response_of(each)
            chunk = -(-widths[place] // (2 * size)) if widths is not None and type(widths[place]) is int else None
            cells = sample_cells(each, self._reading.part.step or 0)
            made = _Sample(cells=cells, total=len(prompt) + len(response), chunk=chunk)
            sample = self._samples.setdefault(name, made)
            if not np.array_equal(sample.cells["response_ids"], response):
                raise ImportFailed(f"{where}, sample {name}: another rank has different tokens for this sample")
            for column, values in values_of(each).items():
                if len(sample.parts.setdefault(column, {}).setdefault(rank, values)) != len(values):
                    raise ImportFailed(f"{where}, sample {name}: {column} has different lengths on two ranks")

    def samples(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each sample's name and column values, merged across ranks."""
        for name, sample in self._samples.items():
            where = f"step {self._reading.part.step}, sample {name}"
            whole = {
                column: _joined(f"{where}: {column}", sample, parts, self._size, partial=self._reading.partial)
                for column, parts in sample.parts.items()
            }
            yield name, sample.cells | whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    cells: dict[str, Any]
    total: int
    chunk: int | None
    parts: dict[str, dict[int, Values]] = field(default_factory=dict)
    """Values by column and context-parallel rank. Tensor-parallel ranks all have the same values."""


def _joined(where: str, sample: _Sample, parts: Mapping[int, Values], size: int, *, partial: bool) -> Values:
    length = len(sample.cells["response_ids"])
    spans = {rank: zig_zag(sample.total, length, rank, size, sample.chunk) for rank in range(size)}
    sizes = {rank: sum(end - start for start, end in spans[rank]) for rank in spans}
    if size == 1 or all(len(part) == length != sizes[rank] for rank, part in parts.items()):
        part = next(iter(parts.values()))
        if len(part) != length:
            raise ImportFailed(
                f"{where} has {len(part)} values for {length} response tokens. Without cp_rank, values from "
                "context-parallel ranks cannot be merged"
            )
        return part
    lacking = [rank for rank in spans if rank not in parts and sizes[rank]]
    if lacking and not partial:
        raise ImportFailed(
            f"{where} is missing context-parallel rank {lacking[0]} of {size}. Copy that rank's file too"
        )
    values, known = np.zeros(length, np.float64), np.zeros(length, bool)
    for rank, part in parts.items():
        if len(part) != sizes[rank]:
            raise ImportFailed(
                f"{where} has {len(part)} values on context-parallel rank {rank}, expected {sizes[rank]}"
            )
        taken = 0
        for start, end in spans[rank]:
            values[start:end] = part.values[taken : taken + end - start]
            known[start:end] = part.known[taken : taken + end - start]
            taken += end - start
    return Values(values, known)


def _number(record: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = record.get(name, default)
    if value is None:
        return default
    if type(value) is not int:
        raise ImportFailed(f"{where}: {name} is not an integer")
    return value
