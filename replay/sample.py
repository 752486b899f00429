"""Draw random prompt groups across a trace's steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Any, TypeVar

import pyarrow.dataset as ds

from ..schemas.errors import InvalidOption
from ..schemas.layout import SCORES, SEQUENCES
from .recorded import RecordedRow, RecordedRun

SEED = 20_260_000
"""Fixed seed, so that a trace always gives the same groups and a larger sample includes every smaller one."""
STEPS_AT_ONCE = 64
_GOLDEN = 0.6180339887498949
"""Golden ratio minus 1. For consecutive steps, its multiples modulo 1 are spread evenly over [0, 1)."""


@dataclass(frozen=True, slots=True)
class Extent:
    seq_id: str
    group: str
    """Prompt group. A sequence without a group_id is its own group."""
    num_tokens: int
    version: int
    """Policy version, or -1 if not recorded."""
    forward: tuple[str, int | None]
    """(writer, forward_id) of the forward pass. The id is None if it was not recorded."""


Row = TypeVar("Row", RecordedRow, Extent)


def extents(run: RecordedRun, steps: Sequence[int]) -> Iterator[tuple[int, list[Extent]]]:
    for start in range(0, len(steps), STEPS_AT_ONCE):
        part = list(steps[start : start + STEPS_AT_ONCE])
        chosen = ds.field("step").isin(part)
        columns = ["step", "seq_id", "group_id", "num_prompt_tokens", "num_response_tokens", "policy_version"]
        known = {
            (step, seq_id): (
                f"sequence {seq_id}" if group is None else f"group {group}", (prompt or 0) + (response or 0), version
            )
            for step, seq_id, group, prompt, response, version in run.records(SEQUENCES, chosen, columns)
        }  # fmt: skip
        of_pass = chosen & (ds.field("pass") == run.replayed_pass)
        columns = ["step", "seq_id", "policy_version", "writer", "forward_id"]
        found: dict[int, list[Extent]] = {step: [] for step in part}
        for step, seq_id, version, writer, forward_id in run.records(SCORES, of_pass, columns):
            group, number, sampled_with = known.get((step, seq_id), (f"sequence {seq_id}", 0, None))
            version = sampled_with if version is None else version
            found[step].append(Extent(seq_id, group, number, -1 if version is None else version, (writer, forward_id)))
        yield from found.items()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Prompt groups, each drawn with probability `share`."""

    share: float
    seed: int
    steps: dict[int, dict[str, str]]
    """Group of each drawn sequence, by step and sequence id. Steps without drawn groups are absent."""
    num_groups: int
    num_sequences: int
    num_steps: int

    @property
    def num_drawn(self) -> int:
        return sum(len(set(step.values())) for step in self.steps.values())

    @property
    def contract(self) -> dict[str, Any]:
        """How the sample was drawn, for the pass's contract. The share is omitted so that the sample can grow."""
        return {"of": "groups, stratified by step", "seed": self.seed}

    def drawn(self, step: int, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if row.seq_id in self.steps[step]]


def parse_sample(text: str | float) -> float:
    """Parse a fraction (below 1) or a number of sequences (1 or more). Raises InvalidOption.

    >>> parse_sample("0.01"), parse_sample("500")
    (0.01, 500.0)
    """
    try:
        wanted = float(text)
    except ValueError:
        wanted = float("nan")
    if not isfinite(wanted) or wanted <= 0 or (wanted >= 1 and wanted != int(wanted)):
        raise InvalidOption(
            f"got {str(text)!r}; pass a fraction below 1 (0.01) or a number of sequences (500)",
            option="sample",
        )
    return wanted


def draw_sample(run: RecordedRun, wanted: float, steps: Sequence[int]) -> Sample:
    groups: dict[int, dict[str, dict[str, None]]] = {step: {} for step in steps}
    for step, rows in extents(run, steps):
        for row in rows:
            groups[step].setdefault(row.group, {})[row.seq_id] = None
    number = sum(map(len, groups.values()))
    total = sum(len(sequences) for of_step in groups.values() for sequences in of_step.values())
    share = wanted if wanted < 1 else min(wanted / max(total, 1), 1.0)
    found: dict[int, dict[str, str]] = {}
    for step, of_step in groups.items():
        drawn = [group for group, place in places(step, list(of_step), SEED).items() if place < share]
        if drawn:
            found[step] = {seq_id: group for group in drawn for seq_id in of_step[group]}
    if not found:
        raise InvalidOption(
            f"none of the {number:,} groups ({total:,} sequences) in these steps was drawn; use a larger sample",
            option="sample",
        )
    return Sample(share=share, seed=SEED, steps=found, num_groups=number, num_sequences=total, num_steps=len(steps))


def places(step: int, groups: Sequence[str], seed: int) -> dict[str, float]:
    """Return evenly spaced positions in [0, 1) for groups in random order. A sample takes groups below its share."""
    order = sorted(groups, key=lambda group: (_hash(f"{seed}/{step}/{group}"), group))
    offset = (_hash(str(seed)) / 2**64 + step * _GOLDEN) % 1.0
    return {group: (rank + offset) / len(order) for rank, group in enumerate(order)}


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
