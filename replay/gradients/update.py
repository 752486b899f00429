"""One optimizer step of a trace: the sequences that its loss went through, and what the loss knew of each.

Shapes: T response tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..recorded import RecordedRow

Place = tuple[str, int]
"""A recorded forward: its writer, and its number there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """One sequence in the loss."""

    row: RecordedRow
    """Of the pass that the loss's forward gave."""
    mask: np.ndarray
    """[T] bool: tokens that count."""
    advantage: np.ndarray
    """[1], or [T], float32"""
    group: str
    passes: dict[str, np.ndarray]
    """Pass -> [T] float32 logprobs, nats; NaN where there is none."""

    @property
    def place(self) -> Place:
        """The micro-batch that it was recorded in."""
        return self.row.writer, self.row.forward_id

    @property
    def num_tokens(self) -> int:
        """That count in the loss."""
        return int(self.mask.sum())


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step: the gradient is that of the weights of `policy_version`."""

    step: int
    """Of the sequences."""
    policy_version: int
    loss_pass: str
    """`current`, or `train` where that is not recorded."""
    contract: str
    rows: tuple[LossRow, ...]
    """In the order in which they went through the model."""
    step_tokens: int
    """That count in the loss, of the whole recorded step."""
    step_places: int
    """Forwards in which the loss's pass went through the whole step once."""
    own_ratio: bool
    """Whether the trainer compared with the loss's own logprobs, so that every ratio was 1."""
    metric_step: int | None
    """The step that its grad norm was logged at; None where that cannot be told."""
    notes: tuple[str, ...] = ()

    @property
    def composition_known(self) -> bool:
        """Whether it was recorded which sequences were a micro-batch."""
        return all(entry.row.composition_known for entry in self.rows)

    @cached_property
    def places(self) -> dict[Place, tuple[LossRow, ...]]:
        """Each micro-batch's rows; one of all rows where they are not known."""
        if not self.composition_known:
            return {("", 0): self.rows}
        found: dict[Place, list[LossRow]] = {}
        for entry in self.rows:
            found.setdefault(entry.place, []).append(entry)
        return {place: tuple(rows) for place, rows in found.items()}

    @property
    def num_tokens(self) -> int:
        """That count in the loss."""
        return sum(entry.num_tokens for entry in self.rows)

    def parts(self, at_least: int) -> list[tuple[LossRow, ...]]:
        """The micro-batches that statistics are over: the recorded ones where there are so many, or groups dealt out.

        Groups stay together, for a row's advantage depends on its group's other rows; where there are fewer groups than
        parts, rows are dealt out.
        """
        if len(self.places) >= at_least:
            return list(self.places.values())
        groups: dict[str, list[LossRow]] = {}
        for index, entry in enumerate(self.rows):
            groups.setdefault(entry.group or f"row {index}", []).append(entry)
        units: Sequence[Sequence[LossRow]] = list(groups.values())
        if len(units) < at_least:
            units = [[entry] for entry in self.rows]
        dealt: list[list[LossRow]] = [[] for _ in range(min(at_least, len(units)))]
        for index, unit in enumerate(units):
            dealt[index % len(dealt)].extend(unit)
        order = {id(entry): index for index, entry in enumerate(self.rows)}
        return [tuple(sorted(part, key=lambda entry: order[id(entry)])) for part in dealt]
