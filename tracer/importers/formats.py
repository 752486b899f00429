from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .fields import Fields, Values
from .format import DumpFolder, Format
from .masked_lines import NEMO_RL, PRIME_RL, Turn, turn_rows
from .megatron import MEGATRON
from .metrics import SCALARS
from .responses import NEMO_GYM, SGLANG, VLLM
from .rollout_bank import MEGATRON_RL
from .skyrl import SKYRL
from .slime_dumps import MILES, SLIME
from .verl import VERL

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
    alignment="logprobs are aligned with response_tokens",
    pattern=r"[^/]*_rollouts_\d+\.jsonl",
    lacks={
        "rollout": "the lines have no logprobs",
        "train": "open-instruct writes only engine logprobs. Record the trainer's with tim_trace.Recorder",
    },
    lines=True,
)


def _torchtitan_rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    turns = fields.record.get("turns")
    if fields.record.get("is_validation") is True:
        return
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns) or not turns:
        raise ImportFailed(f"{fields.where} has no list of turns")
    each = [fields.of(turn, f"{fields.where}, turn {place}") for place, turn in enumerate(turns)]
    version = max((v for turn in each if (v := turn.integer("policy_version")) is not None), default=None)
    cells = fields.cells("step", "reward", "advantage", "group_id", "finish_reason") | {"policy_version": version}
    if cells["step"] is None:
        cells["step"] = version
    if cells["step"] is None:
        raise ImportFailed(f"{fields.where} has neither a step nor a policy version")
    found = [turn for fields in each if (turn := _turn(fields)) is not None]
    rows = [*turn_rows(found)] if len(found) == len(each) else []
    for row in rows or [{}]:
        yield cells | row


def _turn(fields: Fields) -> Turn | None:
    prompt, sampled, logprobs = fields.ids("prompt_ids"), fields.ids("response_ids"), fields.values("rollout_logprobs")
    if prompt is None or sampled is None:
        return None
    if logprobs is not None and len(logprobs) != len(sampled):
        raise ImportFailed(
            f"{fields.where}: {len(logprobs)} logprobs for {len(sampled)} tokens, expected one per token"
        )
    tokens, first = np.concatenate([prompt, sampled]), len(prompt)
    values = Values(np.zeros(len(tokens)), np.zeros(len(tokens), bool))
    if logprobs is not None:
        values.values[first:], values.known[first:] = logprobs.values, logprobs.known
    return tokens, np.arange(len(tokens)) >= first, values


TORCHTITAN = Format(
    name="torchtitan",
    writes="RolloutSampleRecorder in experiments/rl",
    files="rollout_samples.jsonl",
    columns={
        "step": ("step", "max_policy_version"),
        "prompt_ids": ("prompt_token_ids",),
        "response_ids": ("completion_token_ids",),
        "rollout_logprobs": ("completion_logprobs",),
        "policy_version": ("max_policy_version", "policy_version"),
        "reward": ("reward",),
        "advantage": ("advantage",),
        "group_id": ("group_id",),
        "finish_reason": ("status",),
    },
    alignment="completion_logprobs are aligned with a turn's completion_token_ids. Turns that continue "
    "each other are one sequence, in which tokens between turns are masked and have no logprobs. The newest policy "
    "version is used as the step. Validation rollouts are skipped",
    pattern=r"rollout_samples\.jsonl",
    rows=_torchtitan_rows,
    lacks={
        "rollout": "the turns lack token ids or completion_logprobs. Enable them in RolloutSampleRecorder",
        "train": "RolloutSampleRecorder writes only engine logprobs. Record the trainer's with tim_trace.Recorder",
    },
    lines=True,
)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        VERL, SLIME, MILES, SKYRL, PRIME_RL, NEMO_RL, MEGATRON_RL, MEGATRON, VLLM, SGLANG, NEMO_GYM,
        OPEN_INSTRUCT, TORCHTITAN, SCALARS,
    )
}  # fmt: skip


def recognised(folder: DumpFolder) -> str | None:
    found = [name for name, format in FORMATS.items() if format.is_in(folder)]
    if len(found) > 1 and SCALARS.name in found:  # a run's folder often has scalars beside dumps
        found.remove(SCALARS.name)
    if len(found) > 1:
        commands = " or ".join(f"tim-trace import {name} {shlex.quote(folder.url)} -o RUN" for name in found)
        raise ImportFailed(f"{folder.url} contains files from {' and '.join(found)}. Choose one: {commands}")
    return found[0] if found else None
