"""ms-swift: completions.jsonl of `log_completions`, one line a step with a list for every column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .dump import DumpFolder, Format, Reading
from .dump_rows import DumpRows
from .line_files import first_object, one_part_a_file, read_lines
from .rowbatch import RowBatch

_FILE = r"completions\.jsonl"
_TEXTS = ("step", "prompt", "completion", "entropy")

COLUMNS = {"step": ("step",), "advantage": ("advantages",), "prompt": ("prompt",), "completion": ("completion",)}


def _recognises(folder: DumpFolder) -> bool:
    name = next((name for name, _ in folder.matching(_FILE)), None)
    return name is not None and {"step", "prompt", "completion"} <= first_object(folder, name).keys()


def _read(reading: Reading) -> Iterator[RowBatch]:
    ((name, path),) = zip(reading.part.files, reading.paths(), strict=True)
    budget = reading.budget()
    for number, record in read_lines(path, reading.first_line.get(name, 1)):
        reading.last_line[name] = number
        rows = DumpRows(str(path), "line")
        for place, each in enumerate(_rows(record, f"{path}, line {number}")):
            fields = reading.fields(each, f"{path}, line {number}", budget)
            rows.add(
                number,
                step=fields.integer("step"),
                seq_id=f"{number}.{place}",
                prompt_ids=None,
                response_ids=np.empty(0, np.int32),
                advantage=fields.number("advantage"),
                rewards=fields.numbers(_TEXTS),
            )
        if len(rows):
            yield rows.batch()


def _rows(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The rows of a line: one where its columns are single values, or as many as its lists have."""
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    if not lists:
        return [dict(record)]
    lengths = {len(value) for value in lists.values()}
    if len(lengths) != 1:
        raise ImportFailed(f"{where}: its columns are lists of other lengths: {', '.join(map(str, sorted(lengths)))}")
    return [
        {name: value[place] if name in lists else value for name, value in record.items()}
        for place in range(lengths.pop())
    ]


MS_SWIFT = Format(
    name="ms-swift",
    writes="`--log_completions true`",
    files="completions.jsonl",
    columns=COLUMNS,
    alignment="texts alone: no token has an id or a logprob; every other column of numbers is a reward function",
    recognises=_recognises,
    parts=lambda folder: one_part_a_file(folder, _FILE),
    read=_read,
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "log_completions writes texts and rewards, no token ids and no logprobs; record its batches with tim_trace.Recorder, or write them as Parquet",
    ),
    lines=True,
)
