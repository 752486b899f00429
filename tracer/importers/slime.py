"""Import format of slime: rollout dumps, and train dumps in format version 2, with all data-parallel shards in one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .format import Format, Reading
from .pickles import Budget
from .rowbatch import RowBatch
from .samples import (
    COLUMNS,
    StepSamples,
    add_rollout,
    dump_parts,
    framework_of,
    named,
    sample_cells,
    samples_of,
    top_level,
)
from .torch_files import unpickled

_VERSION = 2


def _read(reading: Reading) -> Iterator[RowBatch]:
    step = reading.part.step
    assert step is not None
    samples, names, budget = StepSamples(step), list[str](), reading.budget()
    for path, content in reading.contents():
        record = top_level(unpickled(content, str(path)), str(path))
        if "format_version" in record:
            _add_trained(reading, samples, record, str(path), names, budget)
        elif "rollout_data" in record:
            raise ImportFailed(f"{path}: is a train dump of miles; import it with: tim-trace import miles PATH -o RUN")
        else:
            names = add_rollout(reading, samples, record, str(path), budget)
    yield from samples.batches(reading.part.files[0])


def _add_trained(
    reading: Reading, samples: StepSamples, record: Mapping[str, Any], where: str, names: list[str], budget: Budget
) -> None:
    """Add a train dump's samples; `rollout_position` is their index in the rollout dump and in `raw_reward`."""
    if record.get("format_version") != _VERSION:
        raise ImportFailed(
            f"{where}: unsupported train dump version {record.get('format_version')!r}; expected {_VERSION}"
        )
    found = samples_of(record, where)
    _check_shards(record, where, len(found))
    fields = [reading.fields(sample, f"{where}, sample {place}", budget) for place, sample in enumerate(found)]
    own = list(named(each.text("seq_id") for each in fields))
    rewards = record.get("raw_reward")
    for name, each in zip(own, fields, strict=True):
        position = each.integer("position")
        if position is not None and 0 <= position < len(names):
            name = names[position]
        cells = sample_cells(each, samples.step)
        if isinstance(rewards, (list, tuple)) and position is not None and 0 <= position < len(rewards):
            reward = rewards[position]
            cells["reward"] = float(reward) if isinstance(reward, (int, float, np.number)) else None
        samples.add(name, cells)


def _check_shards(record: Mapping[str, Any], where: str, num_samples: int) -> None:
    """Raise ImportFailed if the listed data-parallel shards do not add up to the samples in the file."""
    shards = record.get("dp_shards")
    listed = (
        [shard.get("sample_indices") for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []
    )
    total = sum(len(indices) for indices in listed if isinstance(indices, (list, tuple)))
    if all(isinstance(indices, (list, tuple)) for indices in listed) and listed and total != num_samples:
        raise ImportFailed(
            f"{where}: has {num_samples} samples, but its {len(listed)} data-parallel shards list {total}"
        )


SLIME = Format(
    name="slime",
    writes="`--dump-details DIR`, `--save-debug-rollout-data`, `--save-debug-train-data`",
    files="rollout_data/<id>.pt and train_data/<id>.pt",
    columns=COLUMNS,
    alignment="lists have response_length values, for tokens[-response_length:]; 0.0 where the loss mask is 0 means no logprob",
    recognises=lambda folder: framework_of(folder) == "slime",
    parts=dump_parts,
    read=_read,
    lacks={
        "rollout": "no rollout_log_probs: slime keeps them with --use-rollout-logprobs or --use-tis",
        "train": "no train dump: --save-debug-train-data (or --dump-details) writes the trainer's log_probs",
    },
)
