"""open-instruct: <run>_rollouts_<shard>.jsonl, the engine's tokens and logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...schemas.errors import ImportFailed
from .dump import Format, Reading
from .fields import Fields
from .line_files import one_part_a_file, rows_of_lines
from .rowbatch import RowBatch

_FILE = r"[^/]*_rollouts_\d+\.jsonl"

COLUMNS = {
    "step": ("step",),
    "prompt_ids": ("prompt_tokens",),
    "response_ids": ("response_tokens",),
    "rollout_logprobs": ("logprobs",),
    "reward": ("reward",),
    "advantage": ("advantage",),
    "finish_reason": ("finish_reason",),
    "group_id": ("prompt_idx",),
}


def _row(fields: Fields, name: str) -> dict[str, Any]:
    response, logprobs = fields.ids("response_ids"), fields.values("rollout_logprobs")
    if response is None:
        raise ImportFailed(f"{fields.where}: has no response_tokens")
    if logprobs is not None and len(logprobs) != len(response):
        raise ImportFailed(f"{fields.where}: has {len(logprobs)} logprobs for {len(response)} tokens")
    return {
        "step": fields.required("step"),
        "seq_id": name,
        "prompt_ids": fields.ids("prompt_ids"),
        "response_ids": response,
        "rollout_logprobs": logprobs,
        "reward": fields.number("reward"),
        "advantage": fields.number("advantage"),
        "finish_reason": fields.text("finish_reason"),
        "group_id": fields.text("group_id"),
    }


def _read(reading: Reading) -> Iterator[RowBatch]:
    yield from rows_of_lines(reading, _row)


OPEN_INSTRUCT = Format(
    name="open-instruct",
    writes="`--save_traces`",
    files="<run>_rollouts_<shard>.jsonl",
    columns=COLUMNS,
    alignment="logprobs belong to response_tokens",
    recognises=lambda folder: any(True for _ in folder.matching(_FILE)),
    parts=lambda folder: one_part_a_file(folder, _FILE),
    read=_read,
    lacks={
        "rollout": "the lines hold no logprobs",
        "train": "open-instruct writes the engine's logprobs alone; its trainer's are in no file: record its batches with tim_trace.Recorder",
    },
    lines=True,
)
