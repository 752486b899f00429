"""All formats that can be imported, by name, and the format detection used for `auto`."""

from __future__ import annotations

from ...schemas.errors import ImportFailed
from .format import DumpFolder, Format
from .miles import MILES
from .ms_swift import MS_SWIFT
from .nemo_rl import NEMO_RL
from .prime_rl import PRIME_RL
from .sglang import SGLANG
from .skyrl import SKYRL
from .slime import SLIME
from .torchtitan import TORCHTITAN
from .trl import TRL
from .verl import VERL
from .vllm import VLLM

OPEN_INSTRUCT = Format(
    name="open-instruct",
    writes="`--save_traces`",
    files="<run>_rollouts_<shard>.jsonl",
    columns={
        "step": ("step",),
        "prompt_ids": ("prompt_tokens",),
        "response_ids": ("response_tokens",),
        "rollout_logprobs": ("logprobs",),
        "reward": ("reward",),
        "advantage": ("advantage",),
        "finish_reason": ("finish_reason",),
        "group_id": ("prompt_idx",),
    },
    alignment="logprobs belong to response_tokens",
    pattern=r"[^/]*_rollouts_\d+\.jsonl",
    needs=("step", "response_ids"),
    lacks={
        "rollout": "the lines hold no logprobs",
        "train": "open-instruct writes only the engine's logprobs; for the trainer's, record its batches with tim_trace.Recorder",
    },
    lines=True,
)


AREAL = Format(
    name="areal",
    writes="the workflow's dump_dir",
    files="rollout/<version>/<task>.jsonl",
    columns={
        "group_id": ("task_id",),
        "policy_version": ("tail_version", "head_version"),
        "reward": ("reward",),
    },
    alignment="texts only, no token ids or logprobs; the version in the folder name is the step",
    pattern=r"(\d+)/[^/]+\.jsonl",
    keys=frozenset({"head_version", "tail_version"}),
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "AReaL dumps only texts; record input_ids, logprobs and prox_logp of its batches with tim_trace.Recorder, or write them as Parquet",
    ),
    lines=True,
)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        VERL, SLIME, MILES, SKYRL, PRIME_RL, NEMO_RL, VLLM, SGLANG, TRL, AREAL, OPEN_INSTRUCT, TORCHTITAN, MS_SWIFT,
    )
}  # fmt: skip


def recognised(folder: DumpFolder) -> str | None:
    """Detect the format of a folder; None if no format matches. Raises ImportFailed if several formats match."""
    found = [name for name, format in FORMATS.items() if format.is_in(folder)]
    if len(found) > 1:
        raise ImportFailed(
            f"{folder.url}: holds files of {' and of '.join(found)}; name the format, for example: tim-trace import {found[0]} PATH"
        )
    return found[0] if found else None
