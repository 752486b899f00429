"""A random share of a trace's sequences, drawn by groups of a prompt and spread over the steps.

Shapes: G groups of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Any

import pyarrow.dataset as ds

from ..schemas.errors import InvalidOption
from ..schemas.layout import SCORES, SEQUENCES
from .recorded import RecordedRow, RecordedRun

SEED = 20_260_000
"""Of every sample: the same trace gives the same groups, and a larger share has those of a smaller one."""
STEPS_AT_ONCE = 64
"""Steps whose sequences are in memory while a sample is drawn or a replay planned."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly in [0, 1) whichever steps are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """What a sample has of a step."""

    unit_of: dict[str, str]
    """Sequence -> its group, of those that were drawn; a sequence without a group_id is a group of its own."""
    num_groups: int
    """Of the whole step."""
    num_sequences: int
    """Of the whole step."""
    weight: float
    """Groups of the whole step that a drawn one stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Groups of the steps that are replayed, each drawn with the probability `share`."""

    share: float
    seed: int
    steps: dict[int, SampledStep]
    """The steps that have a drawn group."""
    num_groups: int
    """Of all steps that were asked for."""
    num_sequences: int
    """Of all steps that were asked for."""
    num_steps: int
    """That were asked for."""

    @property
    def num_drawn(self) -> int:
        """Groups that were drawn."""
        return sum(len(set(step.unit_of.values())) for step in self.steps.values())

    @property
    def contract(self) -> dict[str, Any]:
        """What the contract of a sampled pass says of it: the same for every share, so that a sample can be extended."""
        return {"of": "groups, stratified by step", "seed": self.seed}

    def drawn(self, step: int, rows: Sequence[RecordedRow]) -> list[RecordedRow]:
        """Those of a step's rows that are in the sample."""
        return [row for row in rows if row.seq_id in self.steps[step].unit_of]


def parse_sample(text: str | float) -> float:
    """A share of the sequences below 1, or a number of them from 1 on. Raises InvalidOption.

    >>> parse_sample("0.01"), parse_sample("500")
    (0.01, 500.0)
    """
    try:
        wanted = float(text)
    except ValueError:
        wanted = float("nan")
    if not isfinite(wanted) or wanted <= 0 or (wanted >= 1 and wanted != int(wanted)):
        raise InvalidOption(
            f"got {str(text)!r}; write a share of the sequences below 1, as 0.01, or a number of them, as 500",
            option="sample",
        )
    return wanted


def draw_sample(run: RecordedRun, wanted: float, steps: Sequence[int], *, seed: int = SEED) -> Sample:
    """Draw from the sequences that pass `train` has at these steps; `wanted` is what parse_sample gives.

    Raises InvalidOption where it names no sequence.
    """
    share = wanted if wanted < 1 else min(wanted / max(_num_sequences(run, steps), 1), 1.0)
    found: dict[int, SampledStep] = {}
    number = total = 0
    for part in batched(steps, STEPS_AT_ONCE):
        for step, groups in _groups(run, part).items():
            number, total = number + len(groups), total + sum(map(len, groups.values()))
            if sampled := _sampled_step(step, groups, share, seed):
                found[step] = sampled
    if not found:
        raise InvalidOption(
            f"draws no group: these steps have {number:,} groups of {total:,} sequences; use a larger share",
            option="sample",
        )
    return Sample(share=share, seed=seed, steps=found, num_groups=number, num_sequences=total, num_steps=len(steps))


def batched(steps: Sequence[int], number: int) -> Iterator[Sequence[int]]:
    """The steps, so many at a time."""
    for start in range(0, len(steps), number):
        yield steps[start : start + number]


def places(step: int, groups: Sequence[str], seed: int) -> dict[str, float]:
    """Group -> its place in [0, 1), evenly spread in a random order: those below a share are the sample of this share.

    Each place is uniformly distributed over seeds. Of G groups G * share are drawn, rounded up or down at random.
    """
    order = sorted(groups, key=lambda group: (_hash(f"{seed}/{step}/{group}"), group))
    offset = (_hash(str(seed)) / 2**64 + step * _GOLDEN) % 1.0
    return {group: (rank + offset) / len(order) for rank, group in enumerate(order)}


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _num_sequences(run: RecordedRun, steps: Sequence[int]) -> int:
    """That the replayed pass has of these steps."""
    chosen = ds.field("step").isin(list(steps)) & (ds.field("pass") == run.replayed_pass) & (ds.field("iteration") == 0)
    return int(run.table(SCORES, chosen, ["step"]).num_rows)


def _groups(run: RecordedRun, steps: Sequence[int]) -> dict[int, dict[str, list[str]]]:
    """Step -> group -> sequences."""
    chosen = ds.field("step").isin(list(steps))
    known = run.table(SEQUENCES, chosen, ["step", "seq_id", "group_id"])
    group_of = {
        (step, seq_id): f"sequence {seq_id}" if group is None else f"group {group}"
        for step, seq_id, group in zip(*(known[name].to_pylist() for name in known.column_names), strict=True)
    }
    scored = run.table(SCORES, chosen & (ds.field("pass") == run.replayed_pass), ["step", "seq_id"])
    found: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for step, seq_id in dict.fromkeys(zip(scored["step"].to_pylist(), scored["seq_id"].to_pylist(), strict=True)):
        found[step][group_of.get((step, seq_id), f"sequence {seq_id}")].append(seq_id)
    return found


def _sampled_step(step: int, groups: dict[str, list[str]], share: float, seed: int) -> SampledStep | None:
    drawn = [group for group, place in places(step, list(groups), seed).items() if place < share]
    if not drawn:
        return None
    expected = share * len(groups)
    return SampledStep(
        unit_of={seq_id: group for group in drawn for seq_id in groups[group]},
        num_groups=len(groups),
        num_sequences=sum(len(sequences) for sequences in groups.values()),
        # Below one group a step, those that were drawn stand for other steps, too.
        weight=len(groups) / len(drawn) if expected >= 1 else 1 / share,
    )
