"""Read the samples in dumps of slime and miles. Shapes: S prompt and response tokens, L layers with a router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .columns import RowBatch
from .dump_rows import DumpRows, routed
from .fields import PER_TOKEN, Fields, Values
from .format import Reading
from .pickles import Foreign

FINISHED = {"completed": "stop", "truncated": "length"}

COLUMNS = {
    "tokens": ("tokens",),
    "response_length": ("response_length", "response_lengths"),
    "total_length": ("total_lengths",),
    "response_mask": ("loss_mask", "loss_masks"),
    "rollout_logprobs": ("rollout_log_probs",),
    "train_logprobs": ("log_probs",),
    "reference_logprobs": ("ref_log_probs",),
    "entropy": ("entropy",),
    "advantage": ("advantages",),
    "reward": ("reward",),
    "group_id": ("group_index",),
    "seq_id": ("index", "sample_index", "sample_indices"),
    "position": ("rollout_position", "partition"),
    "policy_version": ("weight_versions",),
    "finish_reason": ("status",),
    "is_removed": ("remove_sample",),
    "rollout_expert_ids": ("rollout_routed_experts",),
}
"""Possible fields for each column, or for a value from which it is computed."""


def response_of(fields: Fields) -> tuple[np.ndarray, np.ndarray]:
    tokens, length = fields.ids("tokens"), fields.integer("response_length")
    if tokens is None or length is None or not 0 <= length <= len(tokens):
        raise ImportFailed(
            f"{fields.where}: response_length is {length}, but the sample has {0 if tokens is None else len(tokens)} tokens"
        )
    return tokens[: len(tokens) - length], tokens[len(tokens) - length :]


def sample_cells(fields: Fields, step: int) -> dict[str, Any]:
    prompt, response = response_of(fields)
    mask = fields.flags("response_mask")
    if fields.get("is_removed") is True:
        mask = np.zeros(len(response), bool)
    cells = {
        "step": step,
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": mask,
        "group_id": fields.text("group_id"),
        "policy_version": _version(fields),
        "finish_reason": FINISHED.get(status := fields.text("finish_reason") or "", status or None),
        "reward": None if isinstance(fields.get("reward"), Mapping) else fields.number("reward"),
        "rewards": fields.rewards("rewards") or fields.rewards("reward"),
    }
    return cells | fields.added_cells({*cells, *fields.added_per_token})


def values_of(fields: Fields) -> dict[str, Values]:
    """Return per-token values by column, leaving out advantages that apply to the whole sample."""
    one = isinstance(fields.get("advantage"), (int, float))
    given = [column for column in (*PER_TOKEN, *fields.added_per_token) if not (one and column == "advantage")]
    return {column: values for column in given if (values := fields.values(column)) is not None}


def experts_of(fields: Fields, num_tokens: int) -> np.ndarray | None:
    """Return router choices [S, L, slots], or None if there are none. The last token, which the model never takes as
    input, has no choices."""
    found = fields.array("rollout_expert_ids", 3)
    if found is None:
        return None
    if len(found) != num_tokens - 1:
        raise ImportFailed(
            f"{fields.where} has router choices for {len(found)} tokens, expected {num_tokens - 1} (all tokens but "
            "the last). Leave them out with --map rollout_routed_experts="
        )
    return routed(found, num_tokens, fields.where)


def _version(fields: Fields) -> int | None:
    found = fields.get("policy_version")
    versions = [found] if isinstance(found, (str, int)) else found if isinstance(found, (list, tuple)) else []
    numbers = [int(v) for v in versions if isinstance(v, (str, int)) and str(v).isdigit() and len(str(v)) < 19]
    return max(numbers, default=None)


def top_level(found: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ImportFailed(f"{where} is not a sample dump")
    return found


def samples_of(record: Mapping[str, Any], where: str) -> list[Any]:
    """Return a dump's samples. A pickled `Sample` object becomes a dict of its attributes."""
    found = record.get("samples")
    if not isinstance(found, (list, tuple)):
        raise ImportFailed(f"{where} has no list of samples")
    return [sample.attributes if isinstance(sample, Foreign) else sample for sample in found]


def named_fields(reading: Reading, samples: Iterable[Mapping[str, Any]], where: str) -> list[tuple[str, Fields]]:
    """Return each sample's name and fields. A sample is named after its index, with a suffix if the index repeats."""
    found: list[tuple[str, Fields]] = []
    seen: dict[str, int] = {}
    for place, sample in enumerate(samples):
        fields = reading.fields(sample, f"{where}, sample {place}")
        base = f"row-{place}" if (index := fields.text("seq_id")) is None else index
        again = seen[base] = seen.get(base, -1) + 1
        found.append((base if not again else f"{base}.{again}", fields))
    return found


class StepSamples:
    def __init__(self, step: int):
        self.step = step
        self.cells: dict[str, dict[str, Any]] = {}

    def add(self, name: str, cells: dict[str, Any]) -> None:
        known = self.cells.setdefault(name, {})
        for column, value in cells.items():
            if column == "response_ids" and column in known and not np.array_equal(known[column], value):
                raise ImportFailed(
                    f"step {self.step}, sample {name}: the rollout file and the train file have different tokens"
                )
            if known.get(column) is None:
                known[column] = value

    def batches(self, file: str) -> Iterator[RowBatch]:
        rows = DumpRows(file, "sample")
        for number, (name, cells) in enumerate(self.cells.items(), start=1):
            rows.add(number, seq_id=name, **cells)
        if len(rows):
            yield rows.batch()


def add_rollout(reading: Reading, samples: StepSamples, record: Mapping[str, Any], where: str) -> list[str]:
    fields = named_fields(reading, samples_of(record, where), where)
    for name, each in fields:
        cells = sample_cells(each, samples.step) | values_of(each)
        cells["rollout_expert_ids"] = experts_of(each, len(cells["prompt_ids"]) + len(cells["response_ids"]))
        samples.add(name, cells)
    return [name for name, _ in fields]


_VERSION = 2


def add_trained(
    reading: Reading, samples: StepSamples, record: Mapping[str, Any], where: str, names: list[str]
) -> None:
    """Add a train dump's samples. Their `rollout_position` is an index into both the rollout dump and `raw_reward`."""
    if record.get("format_version") != _VERSION:
        raise ImportFailed(
            f"{where}: unsupported train dump version {record.get('format_version')!r}; expected {_VERSION}"
        )
    found = samples_of(record, where)
    _check_shards(record, where, len(found))
    rewards = record.get("raw_reward")
    for name, each in named_fields(reading, found, where):
        position = each.integer("position")
        if position is not None and 0 <= position < len(names):
            name = names[position]
        cells = sample_cells(each, samples.step) | values_of(each)
        if isinstance(rewards, (list, tuple)) and position is not None and 0 <= position < len(rewards):
            reward = rewards[position]
            cells["reward"] = float(reward) if isinstance(reward, (int, float, np.number)) else None
        samples.add(name, cells)


def _check_shards(record: Mapping[str, Any], where: str, num_samples: int) -> None:
    shards = record.get("dp_shards")
    dicts = [shard for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []
    listed = [shard.get("sample_indices") for shard in dicts]
    total = sum(len(indices) for indices in listed if isinstance(indices, (list, tuple)))
    if all(isinstance(indices, (list, tuple)) for indices in listed) and listed and total != num_samples:
        raise ImportFailed(
            f"{where} has {num_samples} samples, but its {len(listed)} data-parallel shards list {total} in total"
        )
