"""Import format of ms-swift: completions.jsonl of `log_completions`, one line per step and a list per column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...schemas.errors import ImportFailed
from .fields import Fields
from .format import Format

_TEXTS = ("step", "prompt", "completion", "entropy")


def _rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    for place, record in enumerate(_records(fields.record, fields.where)):
        row = fields.of(record, fields.where)
        yield {"seq_id": f"{number}.{place}", **row.cells("step", "advantage"), "rewards": row.numbers(_TEXTS)}


def _records(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Split a line into rows: one row per list element, or a single row if the line has no lists."""
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    if not lists:
        return [dict(record)]
    lengths = {len(value) for value in lists.values()}
    if len(lengths) != 1:
        raise ImportFailed(
            f"{where}: its columns are lists of different lengths: {', '.join(map(str, sorted(lengths)))}"
        )
    return [
        {name: value[place] if name in lists else value for name, value in record.items()}
        for place in range(lengths.pop())
    ]


MS_SWIFT = Format(
    name="ms-swift",
    writes="`--log_completions true`",
    files="completions.jsonl",
    columns={"step": ("step",), "advantage": ("advantages",), "prompt": ("prompt",), "completion": ("completion",)},
    alignment="texts only, no token ids or logprobs; every other numeric column is a reward function",
    pattern=r"completions\.jsonl",
    keys=frozenset({"step", "prompt", "completion"}),
    rows=_rows,
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "log_completions writes texts and rewards but no token ids or logprobs; record its batches with tim_trace.Recorder, or write them as Parquet",
    ),
    lines=True,
)
