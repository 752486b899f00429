"""AReaL: rollout/<version>/<task>.jsonl, which holds texts, rewards and the weights' versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .dump import DumpFolder, Format, Part, Reading
from .fields import Fields
from .line_files import first_object, rows_of_lines
from .rowbatch import RowBatch

_FILE = r"(\d+)/[^/]+\.jsonl"

COLUMNS = {
    "group_id": ("task_id",),
    "policy_version": ("tail_version", "head_version"),
    "reward": ("reward",),
}


def _parts(folder: DumpFolder) -> list[Part]:
    return [Part(files=(name,), step=int(found[1])) for name, found in folder.matching(_FILE)]


def _recognises(folder: DumpFolder) -> bool:
    name = next((name for name, _ in folder.matching(_FILE)), None)
    return name is not None and {"head_version", "tail_version"} <= first_object(folder, name).keys()


def _read(reading: Reading) -> Iterator[RowBatch]:
    yield from rows_of_lines(reading, lambda fields, name: _row(fields, name, reading.part.step))


def _row(fields: Fields, name: str, step: int | None) -> dict[str, Any]:
    return {
        "step": step,
        "seq_id": name,
        "group_id": fields.text("group_id"),
        "prompt_ids": None,
        "response_ids": np.empty(0, np.int32),
        "policy_version": fields.integer("policy_version"),
        "reward": fields.number("reward"),
    }


AREAL = Format(
    name="areal",
    writes="the workflow's dump_dir",
    files="rollout/<version>/<task>.jsonl",
    columns=COLUMNS,
    alignment="texts alone: no token has an id or a logprob; the folder's version is the step",
    recognises=_recognises,
    parts=_parts,
    read=_read,
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "AReaL dumps texts; write input_ids, logprobs and prox_logp of its batches with tim_trace.Recorder, or as Parquet",
    ),
    lines=True,
)
