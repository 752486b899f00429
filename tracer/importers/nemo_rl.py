"""Import format of NeMo-RL: train_data_step<N>.jsonl, in which every value is a list with one element.

Shapes: S padded sequence length.
"""

from __future__ import annotations

from typing import Any

from ...schemas.errors import ImportFailed
from .fields import Fields, Values
from .format import Format, read_rows

COLUMNS = {
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


def _rows(fields: Fields, name: str, number: int) -> list[dict[str, Any]]:
    record = fields.record.items()
    plain = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in record}
    cells = _cells(fields.of(plain, fields.where))
    return [{"seq_id": str(fields.record.get("idx", number - 1)), **cells}]


def _cells(fields: Fields) -> dict[str, Any]:
    """Return the cells of a sample. Lists in the file are padded on the right, and the token at index 0 has no logprob."""
    tokens, mask = fields.ids("tokens"), fields.flags("response_mask")
    if tokens is None or mask is None:
        raise ImportFailed(f"{fields.where}: lacks token_ids or token_loss_mask")
    length = fields.integer("length")
    length = len(tokens) if length is None else length
    if not 0 < length <= len(tokens) or len(mask) != len(tokens):
        raise ImportFailed(
            f"{fields.where}: input_lengths is {length}, token_ids has {len(tokens)} entries and token_loss_mask {len(mask)}"
        )
    first = int(mask[:length].argmax()) if mask[:length].any() else length
    counts = fields.number("counts")
    cells: dict[str, Any] = {
        "prompt_ids": tokens[:first],
        "response_ids": tokens[first:length],
        "response_mask": mask[first:length] & (counts is None or counts != 0),
        "reward": fields.number("reward"),
    }
    for column in ("rollout_logprobs", "train_logprobs", "reference_logprobs", "advantage"):
        if column == "advantage" and isinstance(fields.get(column), (int, float)):
            cells[column] = fields.number(column)
            continue
        values = fields.values(column)
        if values is None:
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
    writes="the logger, by default (not with NeMo-Gym's response logging)",
    files="train_data_step<N>.jsonl",
    columns=COLUMNS,
    alignment="index i belongs to token_ids[i], index 0 has no value; prompt and tool tokens have 0; if prev_logprobs "
    "are all 0, they were not computed (force_on_policy_ratio)",
    pattern=r"train_data_step(\d+)\.jsonl",
    read=lambda reading: read_rows(reading, _rows, at_once=64),
    lacks={
        "train": "prev_logprobs are all 0: NeMo-RL does not compute them with force_on_policy_ratio=true; turn it off"
    },
)
