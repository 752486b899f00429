"""AReaL: rollout/<version>/<task>.jsonl, which holds texts, rewards and the weights' versions."""

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
    alignment="texts alone: no token has an id or a logprob; the folder's version is the step",
    pattern=r"(\d+)/[^/]+\.jsonl",
    keys=frozenset({"head_version", "tail_version"}),
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "AReaL dumps texts; write input_ids, logprobs and prox_logp of its batches with tim_trace.Recorder, or as Parquet",
    ),
    lines=True,
)
