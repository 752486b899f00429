"""Import format of open-instruct: <run>_rollouts_<shard>.jsonl with the engine's tokens and logprobs."""

from __future__ import annotations

from .format import Format

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
