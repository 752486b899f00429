from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .fields import Fields, Values
from .format import DumpFolder, Format, read_rows
from .masked_lines import NEMO_RL, PRIME_RL
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
    """Yield a rollout as one row: the first prompt, then every turn's sampled tokens and the tokens between turns."""
    turns = fields.record.get("turns")
    if fields.record.get("is_validation") is True:
        return
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns) or not turns:
        raise ImportFailed(f"{fields.where} has no list of turns")
    each = [fields.of(turn, f"{fields.where}, turn {place}") for place, turn in enumerate(turns)]
    version = max((v for turn in each if (v := turn.integer("policy_version")) is not None), default=None)
    cells = fields.cells("step", "reward", "advantage", "group_id", "finish_reason")
    if cells["step"] is None:
        cells["step"] = version
    if cells["step"] is None:
        raise ImportFailed(f"{fields.where} has neither a step nor a policy version")
    yield {**cells, "policy_version": version, **_joined_turns(each)}


def _joined_turns(turns: list[Fields]) -> dict[str, Any]:
    prompts, responses = ([turn.ids(column) for turn in turns] for column in ("prompt_ids", "response_ids"))
    prompt = prompts[0]
    if prompt is None or any(sampled is None for sampled in responses):
        return {}
    whole, values, known, mask = prompt, [np.zeros(0)], [np.zeros(0, bool)], [np.zeros(0, bool)]
    for place, (turn, before, sampled) in enumerate(zip(turns, prompts, responses, strict=True)):
        logprobs = turn.values("rollout_logprobs")
        assert sampled is not None
        if before is None or len(before) < len(whole) or not np.array_equal(before[: len(whole)], whole):
            raise ImportFailed(
                f"{turn.where}: the prompt does not begin with the previous turns' tokens, so turn {place} was "
                "re-tokenized"
            )
        if logprobs is not None and len(logprobs) != len(sampled):
            raise ImportFailed(
                f"{turn.where}: {len(logprobs)} logprobs for {len(sampled)} tokens, expected one per token"
            )
        between = len(before) - len(whole)
        whole = np.concatenate([before, sampled])
        values += [np.zeros(between), np.zeros(len(sampled)) if logprobs is None else logprobs.values]
        known += [np.zeros(between, bool), np.zeros(len(sampled), bool) if logprobs is None else logprobs.known]
        mask += [np.zeros(between, bool), np.ones(len(sampled), bool)]
    scores = Values(np.concatenate(values), np.concatenate(known))
    return {
        "prompt_ids": prompt,
        "response_ids": whole[len(prompt) :],
        "response_mask": np.concatenate(mask),
        "rollout_logprobs": scores if scores.known.any() else None,
    }


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
    alignment="logprobs are aligned with each turn's completion_token_ids. Tokens between turns are masked "
    "and have no logprobs. The newest policy version is used as the step. Validation rollouts are skipped",
    pattern=r"rollout_samples\.jsonl",
    read=lambda reading: read_rows(reading, _torchtitan_rows),
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
    if len(found) > 1 and SCALARS.name in found:  # a run's folder often contains both dumps and scalars
        found.remove(SCALARS.name)
    if len(found) > 1:
        commands = " or ".join(f"tim-trace import {name} {shlex.quote(folder.url)} -o RUN" for name in found)
        raise ImportFailed(f"{folder.url} contains files from {' and '.join(found)}. Choose one: {commands}")
    return found[0] if found else None


_LEFT = {
    "skyrl": r"global_step_\d+/(?:policy/.+|trainer_state\.pt)|latest_ckpt_global_step\.txt|dumped_evals/.+",
    "verl": r"global_step_\d+/(?:(?:actor|critic)/.+|data\.pt)|main_ppo\.log",
    "slime": r"rollout/global_dataset_state_dict_\d+\.pt",
    "prime-rl": r"configs/(?:rl|trainer|orchestrator)\.toml|broadcasts/step_\d+/.+",
    "nemo-rl": r"step_\d+/training_info\.json|val_data_step\d+\.jsonl",
    "OpenRLHF": r"_(?:actor|critic)/(?:latest|global_step\d+/.+)",
    "trl": r"training_args\.bin|trainer_state\.json",
}
"""Patterns for paths that each framework writes, whether or not it writes a dump. SkyRL comes before verl, because both
write data.pt.

They are from verl 1dda039 (trainer/ppo/ray_trainer.py), slime 624b824 (rollout/data_source.py), SkyRL a956457
(train/trainer.py), prime-rl 559b447 (utils/pathing.py), NeMo-RL 7ea279a (utils/checkpoint.py, algorithms/grpo.py),
OpenRLHF 3c3be62 (trainer/ray/ppo_actor.py), TRL (transformers' Trainer).
"""
_CURVES = r"[^/]*\.(?:log|out)|[^/]*(?:metrics|history)[^/]*\.(?:jsonl|csv)"
_CAN_RECORD = ("verl", "trl")


def how_to_dump(folder: DumpFolder) -> str | None:
    """Return instructions for making the folder's framework write a dump, or None if the framework is unknown."""
    name = next((name for name, pattern in _LEFT.items() if folder.first(pattern)), None)
    if name is None:
        return None
    record = ", or record the run: tim-trace record -o RUN -- python train.py" if name in _CAN_RECORD else ""
    if name not in FORMATS:
        return f"{name} writes no tokens. Record its batches with tim_trace.Recorder{record}"
    return f"{name} writes {FORMATS[name].files} with {FORMATS[name].writes.replace('`', '')}{record}"


def curves_in(folder: DumpFolder) -> str:
    """Return a sentence with the command that imports the folder's logged scalars, or "" if it has none."""
    if (name := folder.first(_CURVES)) is None:
        return ""
    path = shlex.quote(os.path.join(folder.url, name))
    return f". To import its curves (no tokens): tim-trace import metrics {path} -o RUN"
