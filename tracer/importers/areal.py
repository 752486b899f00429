"""Import format of AReaL: files rollout/<version>/<task>.jsonl with texts, rewards and weight versions."""

from __future__ import annotations

from .format import Format

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
