"""Import rollout dumps from slime and miles, joined with train dumps, which have one file per step or one per rank.

slime wrote one file per rank up to commit THUDM/slime 429eb3d (slime/utils/train_dump_utils.py) and has written one
file per step since 681b3ad. miles (radixark/miles 31f1ca9, miles/utils/train_dump_utils.py) adds `cp_rank`, `cp_size`
and `qkv_format`.

Tensor-parallel ranks repeat the same data, data-parallel ranks hold different samples, and context-parallel ranks hold
different tokens from the same samples. In the zig-zag layout, rank r out of c holds chunks r and 2c-1-r out of 2c.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from . import slime
from .columns import RowBatch
from .fields import Values
from .format import DumpFolder, Format, Part, Reading
from .pickles import Foreign
from .torch_files import is_cut, read_pickled, unpickled

_ROLLOUT_FILE = r"(?!(?:.*_)?(?:eval|state_dict)_)(?:[A-Za-z-]+_)*(\d+)\.pt"
_TRAIN_FILE = r"(?:(?:train_data|train)[/_]?(\d+)|(?:[A-Za-z-]+_)*[A-Za-z-]*(\d+)_\d+)\.pt"
_USUAL = re.compile(r"(?:.*/)?(?:rollout|train)_data[/_].*")
"""Paths of dumps written with `--dump-details`. If a folder has such files, its other files are checkpoints."""


def dump_parts(folder: DumpFolder) -> list[Part]:
    by_step: dict[int, list[str]] = {}
    rollouts, trains = dump_files(folder)
    for name, step in (*rollouts.items(), *trains.items()):
        by_step.setdefault(step, []).append(name)
    trained = set(trains.values())
    last = max(trained, default=-1)
    parts = []
    for step, names in sorted(by_step.items()):
        cut = next((name for name in names if is_cut(folder.path(name))), None)
        waits = None if cut is None else f"{cut} is incomplete and was left for a later import"
        if waits is None and trained and step not in trained and step > last:
            waits = f"step {step} has no train file yet and was left for a later import (--partial imports its rollout)"
        parts.append(Part(files=tuple(names), step=step, waits_for=waits))
    return parts


def dump_files(folder: DumpFolder) -> tuple[dict[str, int], dict[str, int]]:
    trains = {name: int(found[1] or found[2]) for name, found in folder.matching(_TRAIN_FILE).items()}
    rollouts = {name: int(found[1]) for name, found in folder.matching(_ROLLOUT_FILE).items() if name not in trains}
    return _usual(rollouts), _usual(trains)


def _usual(names: dict[str, int]) -> dict[str, int]:
    return {name: step for name, step in names.items() if _USUAL.fullmatch(name)} or names


def framework_of(folder: DumpFolder) -> str | None:
    """Return "slime", "miles" or None. Dumps that match both (rank files of old releases) count as slime's."""
    kinds = {re.sub(r"\d+", "", name): name for names in reversed(dump_files(folder)) for name in reversed(names)}
    is_dump = False  # rollout dumps and the rank files of old releases do not identify the framework
    for name in kinds.values():
        try:
            record = read_pickled(folder.path(name))
        except ImportFailed:
            continue
        if isinstance(record, dict) and record.keys() & {"samples", "rollout_data"}:
            is_dump = True
            if "format_version" in record:
                return "slime"
            if record.keys() & {"cp_size", "qkv_format", "metadata"}:
                return "miles"
    return "slime" if is_dump else None


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

    def __init__(self, reading: Reading):
        self._reading = reading
        self._samples: dict[str, _Sample] = {}
        self._size = 1

    def add(self, record: Mapping[str, Any], where: str) -> None:
        """Add a rank's samples, leaving out raw_reward, which covers the whole batch."""
        data = slime.top_level(record.get("rollout_data"), where)
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
        for place, (name, each) in enumerate(slime.named_fields(self._reading, samples, where)):
            prompt, response = slime.response_of(each)
            chunk = -(-widths[place] // (2 * size)) if widths is not None and type(widths[place]) is int else None
            cells = slime.sample_cells(each, self._reading.part.step or 0)
            made = _Sample(cells=cells, total=len(prompt) + len(response), chunk=chunk)
            sample = self._samples.setdefault(name, made)
            if not np.array_equal(sample.cells["response_ids"], response):
                raise ImportFailed(f"{where}, sample {name}: another rank has different tokens for this sample")
            for column, values in slime.values_of(each).items():
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
    spans = (zig_zag(sample.total, length, rank, size, sample.chunk) for rank in range(size))
    places = [np.concatenate([np.arange(*span) for span in of_rank]) for of_rank in spans]
    if size == 1 or all(len(part) == length != len(places[rank]) for rank, part in parts.items()):
        part = next(iter(parts.values()))
        if len(part) != length:
            raise ImportFailed(
                f"{where} has {len(part)} values for {length} response tokens. Without cp_rank, values from "
                "context-parallel ranks cannot be merged"
            )
        return part
    lacking = [rank for rank in range(size) if rank not in parts and len(places[rank])]
    if lacking and not partial:
        raise ImportFailed(
            f"{where} is missing context-parallel rank {lacking[0]} of {size}. Copy that rank's file too"
        )
    values, known = np.zeros(length, np.float64), np.zeros(length, bool)
    for rank, part in parts.items():
        if len(part) != len(places[rank]):
            raise ImportFailed(
                f"{where} has {len(part)} values on context-parallel rank {rank}, expected {len(places[rank])}"
            )
        values[places[rank]], known[places[rank]] = part
    return Values(values, known)


def _number(record: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = record.get(name, default)
    if value is None:
        return default
    if type(value) is not int:
        raise ImportFailed(f"{where}: {name} is not an integer")
    return value


def _read(reading: Reading) -> Iterator[RowBatch]:
    step = reading.part.step
    assert step is not None
    samples, ranks, names = slime.StepSamples(step), Ranks(reading), list[str]()
    for path, content in reading.contents():
        record = slime.top_level(unpickled(content, str(path)), str(path))
        if "rollout_data" in record:
            ranks.add(record, str(path))
        elif "format_version" in record:
            slime.add_trained(reading, samples, record, str(path), names)
        else:
            names = slime.add_rollout(reading, samples, record, str(path))
    for name, cells in ranks.samples():
        samples.add(name, cells)
    yield from samples.batches(reading.part.files[0])


SLIME = Format(
    name="slime",
    writes="`--dump-details DIR`, `--save-debug-rollout-data`, `--save-debug-train-data`",
    files="rollout_data/<id>.pt and train_data/<id>.pt (or train_data/<id>_<rank>.pt)",
    columns=slime.COLUMNS,
    alignment="lists are aligned with tokens[-response_length:]. 0.0 where the loss mask is 0 means no logprob",
    recognises=lambda folder: framework_of(folder) == "slime",
    parts=dump_parts,
    read=_read,
    lacks={
        "rollout": "the dump has no rollout_log_probs. slime writes them with --use-rollout-logprobs or --use-tis",
        "train": "the folder has no train dump. --save-debug-train-data (or --dump-details) writes the trainer's log_probs",
    },
)


MILES = replace(
    SLIME,
    name="miles",
    files="rollout_data/<id>.pt and train_data/<id>_<rank>.pt",
    alignment="same as slime, except that context-parallel ranks split the response in a zig-zag layout. "
    "Tensor-parallel ranks have the same data. Old releases of miles wrote the same files as slime, "
    "so `auto` imports these as slime",
    recognises=lambda folder: framework_of(folder) == "miles",
    lacks={name: note.replace("slime", "miles") for name, note in SLIME.lacks.items()},
)
