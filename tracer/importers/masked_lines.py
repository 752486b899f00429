"""Import files from prime-rl and NeMo-RL. Both contain token ids and a loss mask, and the response begins at the first
token that the loss mask includes. A prime-rl line or micro-batch may pack several sequences. NeMo-RL wraps values in
one-element lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .columns import RowBatch
from .dump_rows import masked_row, routed
from .episodes import episode_rows
from .fields import PER_TOKEN, Fields, Values
from .format import DumpFolder, Format, Part, Reading, read_rows
from .micro_batches import read_micro_batches

_EXPORTS = r"step_(\d+)/rank_\d+\.jsonl"
_KINDS = (_EXPORTS, r"step_(\d+)/rank_\d+\.bin", r"step_(\d+)/train/effective/traces\.jsonl")
"""Patterns for files with the same sequences, best first: files with the trainer's logprobs, with all of the
engine's logprobs, or with rounded logprobs."""
_MARKER = "STABLE"
_WAITS = "step {} has no STABLE file yet, so the step was skipped. Import again later, or use --partial"
_VERSION = 1

COLUMNS = {
    "tokens": ("token_ids", "input_ids"),
    "positions": ("position_ids",),
    "response_mask": ("loss_mask", "mask"),
    "rollout_logprobs": ("inference_logprobs", "logprobs"),
    "train_logprobs": ("trainer_logprobs",),
    "reference_logprobs": ("ref_logprobs", "reference_logprobs"),
    "entropy": ("entropy", "entropies"),
    "advantage": ("advantages",),
    "reward": ("rewards",),
    "temperature": ("temperature", "temperatures"),
    "top_p": ("top_p",),
    "max_tokens": ("max_tokens",),
    "finish_reason": ("finish_reason",),
    "rollout_expert_ids": ("routed_experts",),
}


def _parts(folder: DumpFolder) -> list[Part]:
    kind = next(filter(folder.first, _KINDS), _EXPORTS)
    steps: dict[int, list[str]] = {}
    for name, found in folder.matching(kind).items():
        steps.setdefault(int(found[1]), []).append(name)
    parts = []
    for step, names in sorted(steps.items()):
        is_stable = kind != _EXPORTS or all(folder.beside(name, _MARKER) for name in names)
        parts.append(Part(files=tuple(names), step=step, waits_for=None if is_stable else _WAITS.format(step)))
    return parts


def _tokens(fields: Fields) -> tuple[np.ndarray, np.ndarray]:
    tokens, mask = fields.ids("tokens"), fields.flags("response_mask")
    if tokens is None or mask is None:
        raise ImportFailed(f"{fields.where}: token_ids or the loss mask is missing")
    return tokens, mask


def _prime_rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    """Split a line into sequences wherever positions restart at 0. Skip sequences with no token in the loss mask."""
    if (version := fields.record.get("schema_version", _VERSION)) != _VERSION:
        raise ImportFailed(f"{fields.where}: unsupported schema_version {version!r}; expected {_VERSION}")
    tokens, mask = _tokens(fields)
    positions, experts = fields.ids("positions"), fields.array("rollout_expert_ids", 3)
    per_token = (*PER_TOKEN, *fields.added_per_token)
    found = {name: fields.values(name) for name in (*per_token, "reward", "temperature")}
    lengths = {"loss_mask": mask, "position_ids": positions, "routed_experts": experts, **found}
    odd = next((name for name, each in lengths.items() if each is not None and len(each) != len(tokens)), None)
    if odd is not None:
        raise ImportFailed(f"{fields.where}: {odd} must have one entry per token ({len(tokens)})")
    again = [] if positions is None else (np.flatnonzero(positions[1:] == 0) + 1).tolist()
    for start, end in zip([0, *again], [*again, len(tokens)], strict=True):
        part = slice(start, end)
        if not mask[part].any():
            continue
        own = {name: Values(each.values[part], each.known[part]) for name, each in found.items() if each is not None}
        row = masked_row(tokens[part], mask[part], {name: own.get(name) for name in per_token})
        row |= {name: _last(own.get(name), mask[part]) for name in ("reward", "temperature")}
        if experts is not None:
            row["rollout_expert_ids"] = routed(experts[part], end - start, fields.where)
        yield row


def _last(values: Values | None, mask: np.ndarray) -> float | None:
    known = np.empty(0) if values is None else values.values[values.known & mask]
    return float(known[-1]) if len(known) else None


def _read(reading: Reading) -> Iterator[RowBatch]:
    name = reading.part.files[0]
    if name.endswith(".bin"):
        return read_rows(reading, _prime_rows, records=read_micro_batches, unit="micro-batch", at_once=64)
    return read_rows(reading, episode_rows if name.endswith("traces.jsonl") else _prime_rows, at_once=64)


PRIME_RL = Format(
    name="prime-rl",
    writes="`trainer.enable_token_export = true`, the filesystem transport, or the file monitor",
    files="token_exports/step_<N>/rank_<r>.jsonl, else rollouts/step_<N>/rank_<r>.bin, else "
    "rollouts/step_<N>/train/effective/traces.jsonl",
    columns=COLUMNS,
    alignment="the value at index i belongs to token_ids[i]. A sequence's first token has no logprob. null means "
    "no logprob. The response begins at the first token in the loss mask. In traces.jsonl, each path through the nodes is "
    "a sequence, logprobs belong to the tokens in a node's mask, and verifiers 0.4 rounds them to 4 decimals",
    pattern="|".join(_KINDS),
    parts=_parts,
    read=_read,
    lacks={"train": "only token exports and traces.jsonl have trainer logprobs. Set trainer.enable_token_export=true"},
)


_NEMO_RL_COLUMNS = {
    "tokens": ("token_ids",),
    "length": ("input_lengths",),
    "response_mask": ("token_loss_mask",),
    "counts": ("sample_loss_mask",),
    "rollout_logprobs": ("generation_logprobs",),
    "train_logprobs": ("prev_logprobs",),
    "reference_logprobs": ("reference_policy_logprobs",),
    "advantage": ("advantages",),
    "reward": ("rewards",),
}


def _nemo_rl_rows(fields: Fields, name: str, number: int) -> list[dict[str, Any]]:
    record = fields.record.items()
    plain = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in record}
    row = fields.of(plain, fields.where)
    cells = _cells(row)
    return [{"seq_id": str(fields.record.get("idx", number - 1)), **cells, **row.added_cells(cells)}]


def _cells(fields: Fields) -> dict[str, Any]:
    """Return a record's cells. Its lists are right-padded, and the token at index 0 has no logprob."""
    tokens, mask = _tokens(fields)
    length = fields.integer("length")
    length = len(tokens) if length is None else length
    if not 0 < length <= len(tokens) or len(mask) != len(tokens):
        raise ImportFailed(
            f"{fields.where}: input_lengths is {length}, but there are {len(tokens)} token_ids and {len(mask)} "
            "entries in token_loss_mask"
        )
    first = int(mask[:length].argmax()) if mask[:length].any() else length
    counts = fields.number("counts")
    cells: dict[str, Any] = {
        "prompt_ids": tokens[:first],
        "response_ids": tokens[first:length],
        "response_mask": mask[first:length] & (counts is None or counts != 0),
        "reward": fields.number("reward"),
    }
    for column in (*PER_TOKEN, *fields.added_per_token):
        if column == "advantage" and isinstance(fields.get(column), (int, float)):
            cells[column] = fields.number(column)
            continue
        if (values := fields.values(column)) is None:
            continue
        if column == "advantage" and len(values) == 1 != len(tokens):
            cells[column] = float(values.values[0])
            continue
        if len(values) != len(tokens):
            raise ImportFailed(f"{fields.where}: {column} has {len(values)} values for {len(tokens)} tokens")
        known = values.known.copy()
        known[0] = known[0] and column == "advantage"
        if column != "advantage":
            known &= (values.values != 0.0) | mask
        cells[column] = Values(values.values, known)[first:length]
    return cells


NEMO_RL = Format(
    name="nemo-rl",
    writes="the logger by default (not with NeMo-Gym's response logging)",
    files="train_data_step<N>.jsonl",
    columns=_NEMO_RL_COLUMNS,
    alignment="the value at index i belongs to token_ids[i]. Index 0 has no value. Values are 0 for prompt and tool "
    "tokens. If all prev_logprobs are 0, NeMo-RL did not compute them (force_on_policy_ratio=true)",
    pattern=r"train_data_step(\d+)\.jsonl",
    read=lambda reading: read_rows(reading, _nemo_rl_rows, at_once=64),
    lacks={"train": "prev_logprobs are all 0. NeMo-RL computes them only with force_on_policy_ratio=false"},
)
