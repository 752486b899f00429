"""Import format of prime-rl: token exports with one line per packed row, which may hold several sequences.

Shapes: S tokens in a packed row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .fields import Fields, Values
from .format import DumpFolder, Format, Part, read_rows

_FILE = r"step_(\d+)/rank_(\d+)\.jsonl"
_MARKER = "STABLE"
_VERSION = 1

COLUMNS = {
    "tokens": ("token_ids",),
    "positions": ("position_ids",),
    "response_mask": ("loss_mask",),
    "rollout_logprobs": ("inference_logprobs",),
    "train_logprobs": ("trainer_logprobs",),
    "entropy": ("entropy",),
    "advantage": ("advantages",),
    "reward": ("rewards",),
    "environment": ("env_name",),
}


def _parts(folder: DumpFolder) -> list[Part]:
    steps: dict[int, list[str]] = {}
    for name, found in folder.matching(_FILE):
        steps.setdefault(int(found[1]), []).append(name)
    parts = []
    for step, names in sorted(steps.items()):
        unstable = [name for name in names if folder.beside(name, _MARKER) is None]
        waits = (
            f"step {step} has no {_MARKER} yet; skipped until a later import (--partial reads it)" if unstable else None
        )
        parts.append(Part(files=tuple(names), step=step, waits_for=waits))
    return parts


_PER_TOKEN = ("rollout_logprobs", "train_logprobs", "entropy", "advantage")


def _rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield a line's sequences, split where positions restart at 0; those without a token in the loss are skipped."""
    if (version := fields.record.get("schema_version", _VERSION)) != _VERSION:
        raise ImportFailed(f"{fields.where}: unsupported schema_version {version!r}; expected {_VERSION}")
    tokens, mask = fields.ids("tokens"), fields.flags("response_mask")
    if tokens is None or mask is None:
        raise ImportFailed(f"{fields.where}: lacks token_ids or loss_mask")
    positions = fields.ids("positions")
    found = {name: fields.values(name) for name in (*_PER_TOKEN, "reward")}
    lengths = {name: len(values) for name, values in (("loss_mask", mask), *found.items()) if values is not None}
    odd = next((name for name, length in lengths.items() if length != len(tokens)), None)
    if odd is not None or (positions is not None and len(positions) != len(tokens)):
        raise ImportFailed(f"{fields.where}: {odd or 'position_ids'} is not as long as token_ids ({len(tokens)})")
    again = [] if positions is None else (np.flatnonzero(positions[1:] == 0) + 1).tolist()
    for start, end in zip([0, *again], [*again, len(tokens)], strict=True):
        if not mask[start:end].any():
            continue
        first = start + int(mask[start:end].argmax())
        yield {
            "prompt_ids": tokens[start:first],
            "response_ids": tokens[first:end],
            "response_mask": mask[first:end],
            **{name: _part(found[name], start, first, end) for name in _PER_TOKEN},
            "reward": _reward(found["reward"], first, end),
        }


def _part(values: Values | None, start: int, first: int, end: int) -> Values | None:
    """Return the values for the response tokens. The first token in a sequence has no context and therefore no value."""
    if values is None or not values.known[first:end].any():
        return None
    part = Values(values.values[first:end], values.known[first:end].copy())
    if first == start and len(part):
        part.known[0] = False
    return part


def _reward(values: Values | None, first: int, end: int) -> float | None:
    known = None if values is None else values.values[first:end][values.known[first:end]]
    return None if known is None or not len(known) else float(known[-1])


PRIME_RL = Format(
    name="prime-rl",
    writes="`trainer.enable_token_export = true`",
    files="token_exports/step_<N>/rank_<r>.jsonl",
    columns=COLUMNS,
    alignment="index i belongs to token_ids[i]; the first token of a sequence has no logprob, and null means no "
    "logprob; the response begins at the first token in the loss mask",
    pattern=_FILE,
    parts=_parts,
    read=lambda reading: read_rows(reading, _rows, at_once=64),
)
