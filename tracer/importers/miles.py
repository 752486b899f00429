"""Import format of miles: rollout dumps, and train dumps with one file per rank.

Tensor-parallel ranks hold the same data, data-parallel ranks different samples, and context-parallel ranks different tokens
of the same samples. In the zig-zag layout, rank r of c ranks has the chunks r and 2c-1-r out of 2c chunks.

Shapes: T response tokens, S tokens in prompt and response together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .columns import RowBatch
from .fields import Values
from .format import Format, Reading
from .pickles import Budget
from .slime import (
    COLUMNS,
    PER_TOKEN,
    StepSamples,
    add_rollout,
    dump_parts,
    framework_of,
    named,
    response_of,
    sample_cells,
    top_level,
    values_of,
)
from .torch_files import unpickled


def zig_zag(total: int, length: int, rank: int, size: int, chunk: int | None = None) -> list[tuple[int, int]]:
    """Return the two ranges [start, end) of response tokens that a context-parallel rank has.

    `total` is the number of prompt and response tokens S, `length` the number of response tokens T. A chunk has
    ceil(S / (2 size)) tokens unless `chunk` is given. The logits at position p predict token p + 1.

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


def _read(reading: Reading) -> Iterator[RowBatch]:
    step = reading.part.step
    assert step is not None
    samples, budget, shards = StepSamples(step), reading.budget(), _Shards(step, reading.partial)
    for path, content in reading.contents():
        record = top_level(unpickled(content, str(path)), str(path))
        if "rollout_data" in record:
            _add_rank(reading, shards, record, str(path), budget)
        elif "format_version" in record:
            raise ImportFailed(f"{path}: is a train dump of slime; import it with: tim-trace import slime PATH -o RUN")
        else:
            add_rollout(reading, samples, record, str(path), budget)
    for name, cells in shards.samples():
        samples.add(name, cells)
    yield from samples.batches(reading.part.files[0])


class _Shards:
    """The samples of one step, assembled from the ranks' files."""

    def __init__(self, step: int, partial: bool):
        self.step, self._partial = step, partial
        self._cells: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, dict[str, dict[int, Values]]] = {}
        self._lengths: dict[str, tuple[int, int, int | None]] = {}
        self._size = 1

    def add(
        self,
        name: str,
        cells: dict[str, Any],
        parts: dict[str, Values],
        total: int,
        rank: int,
        size: int,
        chunk: int | None,
    ) -> None:
        """Add one rank's part of a sample; duplicates from tensor-parallel ranks are ignored."""
        self._cells.setdefault(name, cells)
        self._lengths[name] = (total, len(cells["response_ids"]), chunk)
        self._size = max(self._size, size)
        known = self._parts.setdefault(name, {})
        for column, values in parts.items():
            before = known.setdefault(column, {}).setdefault(rank, values)
            if len(before) != len(values):
                raise ImportFailed(f"step {self.step}, sample {name}: two ranks hold {column} of different lengths")

    def samples(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each sample with its parts joined."""
        for name, cells in self._cells.items():
            total, length, chunk = self._lengths[name]
            whole = {
                column: self._joined(name, column, parts, total, length, chunk)
                for column, parts in self._parts[name].items()
            }
            yield name, {**cells, **whole}

    def _joined(
        self, name: str, column: str, parts: Mapping[int, Values], total: int, length: int, chunk: int | None
    ) -> Values:
        where = f"step {self.step}, sample {name}: {column}"
        spans = {rank: zig_zag(total, length, rank, self._size, chunk) for rank in range(self._size)}
        sizes = {rank: sum(end - start for start, end in spans[rank]) for rank in spans}
        if self._size == 1 or all(len(part) == length != sizes[rank] for rank, part in parts.items()):
            part = next(iter(parts.values()))
            if len(part) != length:
                raise ImportFailed(
                    f"{where} has {len(part)} values for {length} response tokens; a dump of context-parallel ranks "
                    "without cp_rank cannot be joined"
                )
            return part
        lacking = [rank for rank in spans if rank not in parts and sizes[rank]]
        if lacking and not self._partial:
            raise ImportFailed(
                f"{where} lacks the context-parallel rank {lacking[0]} of {self._size}; copy its file too"
            )
        values, known = np.zeros(length, np.float64), np.zeros(length, bool)
        for rank, part in parts.items():
            if len(part) != sizes[rank]:
                raise ImportFailed(
                    f"{where} has {len(part)} values on context-parallel rank {rank}, which should have {sizes[rank]}"
                )
            taken = 0
            for start, end in spans[rank]:
                values[start:end] = part.values[taken : taken + end - start]
                known[start:end] = part.known[taken : taken + end - start]
                taken += end - start
        return Values(values, known)


def _add_rank(reading: Reading, shards: _Shards, record: Mapping[str, Any], where: str, budget: Budget) -> None:
    """Add one rank's file, a dict of lists with one element per sample; raw_reward, of the whole batch, is skipped."""
    data = top_level(record.get("rollout_data"), where)
    tokens = data.get("tokens")
    if not isinstance(tokens, (list, tuple)):
        raise ImportFailed(f"{where}: has no list of tokens")
    rank, size = _number(record, "cp_rank", 0, where), _number(record, "cp_size", 1, where)
    if not 0 <= rank < size <= 4096:
        raise ImportFailed(f"{where}: is context-parallel rank {rank} of {size}")
    listed = {
        name: value for name, value in data.items() if isinstance(value, (list, tuple)) and len(value) == len(tokens)
    }
    fields = [
        reading.fields({name: value[place] for name, value in listed.items()}, f"{where}, sample {place}", budget)
        for place in range(len(tokens))
    ]
    widths = listed.get("max_seq_lens") if record.get("qkv_format") == "bshd" else None
    for place, (name, each) in enumerate(zip(named(each.text("seq_id") for each in fields), fields, strict=True)):
        prompt, response = response_of(each)
        chunk = -(-widths[place] // (2 * size)) if widths is not None and type(widths[place]) is int else None
        cells = sample_cells(each.without(PER_TOKEN), shards.step)
        shards.add(name, cells, values_of(each), len(prompt) + len(response), rank, size, chunk)


def _number(record: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = record.get(name, default)
    if value is None:
        return default
    if type(value) is not int:
        raise ImportFailed(f"{where}: {name} is not an integer")
    return value


MILES = Format(
    name="miles",
    writes="`--dump-details DIR`, `--save-debug-rollout-data`, `--save-debug-train-data`",
    files="rollout_data/<id>.pt and train_data/<id>_<rank>.pt",
    columns=COLUMNS,
    alignment="same as slime; each context-parallel rank has its zig-zag part of the response, and tensor-parallel "
    "ranks hold the same data",
    recognises=lambda folder: framework_of(folder) == "miles",
    parts=dump_parts,
    read=_read,
    lacks={
        "rollout": "no rollout_log_probs: miles keeps them with --use-rollout-logprobs or --use-tis",
        "train": "no train dump: --save-debug-train-data (or --dump-details) writes the trainer's log_probs",
    },
)
