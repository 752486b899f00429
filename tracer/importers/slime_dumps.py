"""Import rollout dumps from slime and miles, joined with train dumps, which have one file per step or one per rank.

slime wrote one file per rank up to commit THUDM/slime 429eb3d (slime/utils/train_dump_utils.py) and has written one
file per step since 681b3ad. miles (radixark/miles 31f1ca9, miles/utils/train_dump_utils.py) adds `cp_rank`, `cp_size`
and `qkv_format`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ...schemas.errors import ImportFailed
from .columns import RowBatch
from .format import DumpFolder, Format, Part, Reading
from .rank_files import Ranks
from .slime import COLUMNS, StepSamples, add_rollout, add_trained, top_level
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
    trains = {name: int(found[1] or found[2]) for name, found in folder.matching(_TRAIN_FILE)}
    rollouts = {name: int(found[1]) for name, found in folder.matching(_ROLLOUT_FILE) if name not in trains}
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


def _read(reading: Reading) -> Iterator[RowBatch]:
    step = reading.part.step
    assert step is not None
    samples, names, budget = StepSamples(step), list[str](), reading.budget()
    ranks = Ranks(reading, budget)
    for path, content in reading.contents():
        record = top_level(unpickled(content, str(path)), str(path))
        if "rollout_data" in record:
            ranks.add(record, str(path))
        elif "format_version" in record:
            add_trained(reading, samples, record, str(path), names, budget)
        else:
            names = add_rollout(reading, samples, record, str(path), budget)
    for name, cells in ranks.samples():
        samples.add(name, cells)
    yield from samples.batches(reading.part.files[0])


SLIME = Format(
    name="slime",
    writes="`--dump-details DIR`, `--save-debug-rollout-data`, `--save-debug-train-data`",
    files="rollout_data/<id>.pt and train_data/<id>.pt (or train_data/<id>_<rank>.pt)",
    columns=COLUMNS,
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
