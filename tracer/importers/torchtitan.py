"""Import format of torchtitan: rollout_samples.jsonl, one line per multi-turn rollout, with only the engine's logprobs.

Shapes: T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .fields import Fields, Values
from .format import Format


def _rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield a rollout as one row.

    The prompt is that of the first turn. The response holds the sampled tokens and the tokens inserted between turns.
    """
    turns = fields.record.get("turns")
    if fields.record.get("is_validation") is True:
        return
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns) or not turns:
        raise ImportFailed(f"{fields.where}: has no list of turns")
    each = [fields.of(turn, f"{fields.where}, turn {place}") for place, turn in enumerate(turns)]
    version = max((v for turn in each if (v := turn.integer("policy_version")) is not None), default=None)
    cells = fields.cells("step", "reward", "advantage", "group_id", "finish_reason")
    if cells["step"] is None:
        cells["step"] = version
    if cells["step"] is None:
        raise ImportFailed(f"{fields.where}: has neither a step nor a policy version")
    yield {**cells, "policy_version": version, **_tokens(each)}


def _tokens(turns: list[Fields]) -> dict[str, Any]:
    """Return cells with the joined tokens of consecutive turns; an empty dict if the turns have no token ids."""
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
                f"{turn.where}: its prompt does not continue the previous turns' tokens; turn {place} was re-tokenized"
            )
        if logprobs is not None and len(logprobs) != len(sampled):
            raise ImportFailed(f"{turn.where}: has {len(logprobs)} logprobs for {len(sampled)} tokens")
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
    writes="RolloutSampleRecorder of experiments/rl",
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
    alignment="completion_logprobs belong to completion_token_ids of a turn; tokens between turns are masked and have "
    "no logprobs; the newest policy version is the step; validation rollouts are skipped",
    pattern=r"rollout_samples\.jsonl",
    rows=_rows,
    lacks={
        "rollout": "the turns lack token ids or completion_logprobs; turn on their recording in RolloutSampleRecorder",
        "train": "RolloutSampleRecorder writes only the engine's logprobs; for the trainer's, record its batches with tim_trace.Recorder",
    },
    lines=True,
)
