"""Samples of slime and miles: rollout dumps, and the trainers' dumps of the same rollouts, joined by sample.

Shapes: T response tokens, S tokens of prompt and response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .dump import DumpFolder, Part, Reading
from .dump_rows import DumpRows, routed
from .fields import Fields, Values
from .pickles import Budget
from .rowbatch import RowBatch
from .torch_files import is_cut, read_pickled

_ROLLOUT_FILE = r"(?!(?:.*_)?eval_)(?:[A-Za-z-]+_)*(\d+)\.pt"
_TRAIN_FILE = r"(?:(?:train_data|train)[/_]?(\d+)(?:_(\d+))?|(\d+)_(\d+))\.pt"
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
    "kept_offsets": ("rollout_top_p_token_offsets",),
    "kept_logprobs": ("rollout_top_p_log_probs",),
    "is_removed": ("remove_sample",),
    "experts": ("rollout_routed_experts",),
}
"""Column -> fields; those that are none of the trace's are used for the others."""

PER_TOKEN = ("rollout_logprobs", "train_logprobs", "reference_logprobs", "entropy", "advantage")
KEPT_MASS = "rollout/kept_mass"
"""Pass whose logprobs are the log of the probability that top-p kept at each token."""
KEPT_TOKENS = "rollout/top_p_kept_tokens"
"""Metric: mean number of tokens that top-p kept."""


def dump_parts(folder: DumpFolder) -> list[Part]:
    """Rollout files and the trainers' files of the same rollout, together. Those of evaluations are passed over."""
    by_step: dict[int, list[str]] = {}
    rollouts, trains = dump_files(folder)
    for name, step in (*rollouts.items(), *trains.items()):
        by_step.setdefault(step, []).append(name)
    trained = set(trains.values())
    last = max(trained, default=-1)
    parts = []
    for step, names in sorted(by_step.items()):
        cut = next((name for name in names if is_cut(folder.path(name))), None)
        waits = None if cut is None else f"{cut} is half-written; it was left for a later import"
        if waits is None and trained and step not in trained and step > last:
            waits = f"step {step} has no train file yet; it was left for a later import (--partial imports its rollout)"
        parts.append(Part(files=tuple(names), step=step, waits_for=waits))
    return parts


def dump_files(folder: DumpFolder) -> tuple[dict[str, int], dict[str, int]]:
    """File -> rollout, of the files of rollouts and of the trainers'."""
    trains = {name: int(found[1] or found[3]) for name, found in folder.matching(_TRAIN_FILE)}
    rollouts = {name: int(found[1]) for name, found in folder.matching(_ROLLOUT_FILE) if name not in trains}
    return rollouts, trains


def framework_of(folder: DumpFolder) -> str | None:
    """Whose dumps these are, by the first file that can be read; None where they are neither's.

    Train files of miles are one a rank; its rollout files have `metadata`, and slime's have not.
    """
    for names in reversed(dump_files(folder)):
        for name in names:
            try:
                found = read_pickled(folder.path(name))
            except ImportFailed:
                continue
            if not isinstance(found, dict) or not found.keys() & {"samples", "rollout_data"}:
                return None
            is_miles = "rollout_data" in found or ("metadata" in found and "format_version" not in found)
            return "miles" if is_miles else "slime"
    return None


def response_of(fields: Fields) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the prompt and of the response of a sample: the last `response_length` tokens are the response."""
    tokens, length = fields.ids("tokens"), fields.integer("response_length")
    if tokens is None or length is None or not 0 <= length <= len(tokens):
        raise ImportFailed(
            f"{fields.where}: has {length} response tokens of {0 if tokens is None else len(tokens)} tokens"
        )
    return tokens[: len(tokens) - length], tokens[len(tokens) - length :]


def sample_cells(fields: Fields, step: int) -> dict[str, Any]:
    """Cells of a sample whose lists are aligned with its response; 0.0 where the mask is 0 is no logprob."""
    prompt, response = response_of(fields)
    mask = fields.flags("response_mask")
    if fields.get("is_removed") is True:
        mask = np.zeros(len(response), bool)
    cells: dict[str, Any] = {
        "step": step,
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": mask,
        "group_id": fields.text("group_id"),
        "policy_version": _version(fields),
        "finish_reason": FINISHED.get(status := fields.text("finish_reason") or "", status or None),
        "reward": None if isinstance(fields.get("reward"), Mapping) else fields.number("reward"),
        "rewards": _reward_parts(fields.get("reward")),
    }
    for column in PER_TOKEN:
        found = _of_tokens(fields, column, len(response))
        if found is not None:
            cells[column] = found
    if mask is not None and len(mask) != len(response):
        raise ImportFailed(f"{fields.where}: its loss mask has {len(mask)} values for {len(response)} response tokens")
    return cells


def _of_tokens(fields: Fields, column: str, length: int) -> Values | None:
    value = fields.get(column)
    if column == "advantage" and value is not None and isinstance(value, (int, float)):
        return None
    found = fields.values(column)
    if found is not None and len(found) != length:
        raise ImportFailed(f"{fields.where}: {column} has {len(found)} values for {length} response tokens")
    return found


def experts_of(fields: Fields, num_tokens: int) -> np.ndarray | None:
    """The experts of each token of a sample: [S - 1, L, slots] of the tokens that the engine computed, the last one had no need."""
    found = fields.array("experts", 3)
    if found is None:
        return None
    if len(found) != num_tokens - 1:
        raise ImportFailed(
            f"{fields.where}: has router choices of {len(found)} tokens, where {num_tokens - 1} of its {num_tokens} are routed; "
            "leave them out with --map rollout_routed_experts="
        )
    return routed(found, num_tokens, fields.where)


def _version(fields: Fields) -> int | None:
    """The newest version of the weights that sampled, where versions are numbers."""
    found = fields.get("policy_version")
    versions = [found] if isinstance(found, (str, int)) else found if isinstance(found, (list, tuple)) else []
    numbers = [int(v) for v in versions if isinstance(v, (str, int)) and str(v).isdigit() and len(str(v)) < 19]
    return max(numbers, default=None)


def _reward_parts(reward: Any) -> dict[str, float] | None:
    if not isinstance(reward, Mapping):
        return None
    return {
        name: float(value)
        for name, value in reward.items()
        if isinstance(value, (int, float)) and isinstance(name, str) and abs(value) < 2**53
    }


def kept_sets(fields: Fields, length: int) -> tuple[float, Values | None] | None:
    """Mean number of tokens that top-p kept, and the log of their probability at each token, where a sample says it.

    `offsets` [T + 1] says where each token's set begins; an empty set belongs to a token that was not generated.
    """
    offsets = fields.values("kept_offsets")
    if offsets is None:
        return None
    ends = offsets.values.astype(np.int64)
    if len(ends) != length + 1 or (len(ends) and ends[0] != 0) or (np.diff(ends) < 0).any():
        raise ImportFailed(f"{fields.where}: its top-p offsets are not {length + 1} growing numbers from 0")
    sizes = np.diff(ends)
    mean = float(sizes[sizes > 0].mean()) if (sizes > 0).any() else float("nan")
    logprobs = fields.values("kept_logprobs")
    if logprobs is None:
        return mean, None
    if len(logprobs) != ends[-1]:
        raise ImportFailed(f"{fields.where}: has {len(logprobs)} logprobs for top-p sets of {ends[-1]} tokens")
    mass = np.zeros(length, np.float64)
    filled = np.flatnonzero(sizes)
    if len(filled):
        mass[filled] = np.logaddexp.reduceat(logprobs.values.astype(np.float64), ends[:-1][filled])
    return mean, Values(np.minimum(mass, 0.0), sizes > 0)


def top_level(found: Any, where: str) -> Mapping[str, Any]:
    """A dump's record. Raises ImportFailed."""
    if not isinstance(found, dict):
        raise ImportFailed(f"{where}: is no dump of samples")
    return found


def samples_of(record: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The samples of a dump. Raises ImportFailed."""
    found = record.get("samples")
    if not isinstance(found, (list, tuple)) or not all(isinstance(sample, dict) for sample in found):
        raise ImportFailed(f"{where}: has no list of samples")
    return list(found)


def named(indices: Iterable[str | None]) -> Iterator[str]:
    """A name for each sample: its index, and a number where the index comes again."""
    seen: dict[str, int] = {}
    for place, index in enumerate(indices):
        base = f"row-{place}" if index is None else index
        again = seen[base] = seen.get(base, -1) + 1
        yield base if not again else f"{base}.{again}"


class StepSamples:
    """The samples of one step, of the rollout and of the trainer, by what they have in common."""

    def __init__(self, step: int):
        self.step = step
        self.cells: dict[str, dict[str, Any]] = {}
        self._kept: list[float] = []

    def add(self, name: str, cells: dict[str, Any]) -> None:
        """Add what one file says of a sample; what another one said first, stays."""
        known = self.cells.setdefault(name, {})
        for column, value in cells.items():
            if column == "response_ids" and column in known and not np.array_equal(known[column], value):
                raise ImportFailed(
                    f"step {self.step}, sample {name}: the rollout's and the trainer's files hold other tokens"
                )
            if known.get(column) is None:
                known[column] = value

    def add_kept(self, name: str, fields: Fields) -> None:
        """Add what top-p kept."""
        kept = kept_sets(fields, len(self.cells[name]["response_ids"]))
        if kept is not None:
            if np.isfinite(kept[0]):
                self._kept.append(kept[0])
            if kept[1] is not None:
                self.cells[name][f"{KEPT_MASS}_logprobs"] = kept[1]

    @property
    def metrics(self) -> dict[str, float]:
        """Values of the step to log."""
        return {KEPT_TOKENS: float(np.mean(self._kept))} if self._kept else {}

    def rows(self, file: str) -> DumpRows:
        """A row for every sample."""
        rows = DumpRows(file, "sample")
        for number, (name, cells) in enumerate(self.cells.items(), start=1):
            rows.add(number, seq_id=name, **cells)
        return rows


def add_rollout(
    reading: Reading, samples: StepSamples, record: Mapping[str, Any], where: str, budget: Budget
) -> list[str]:
    """Add a rollout dump, and give the samples' names in its order."""
    found = samples_of(record, where)
    fields = [reading.fields(sample, f"{where}, sample {place}", budget) for place, sample in enumerate(found)]
    names = list(named(each.text("seq_id") for each in fields))
    for name, each in zip(names, fields, strict=True):
        cells = sample_cells(each, samples.step)
        cells["routing"] = experts_of(each, len(cells["prompt_ids"]) + len(cells["response_ids"]))
        samples.add(name, cells)
        samples.add_kept(name, each)
    return names


def emit(reading: Reading, samples: StepSamples) -> Iterator[RowBatch]:
    """The rows of a step."""
    if samples.metrics:
        reading.metrics[samples.step] = samples.metrics
    if samples.cells:
        yield samples.rows(reading.part.files[0]).batch()
