"""Result of a comparison of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..statement import Measured, Statement

KINDS = (
    "steps", "setting", "sampling", "contract", "prompts", "responses", "logprobs", "rewards", "advantages", "lag", "series",
)  # fmt: skip
"""Kinds of differences, in causal order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """One difference between two runs."""

    kind: str
    """Element of KINDS."""
    name: str
    """Setting, `pass.field` of a contract, pass or series; empty if the kind needs no name."""
    step: int
    """First step at which they differ; for a series the start of the first segment that differs beyond noise."""
    a: Measured | None
    """Value in run A at that step; for a series its median from there to the next change; None if missing."""
    b: Measured | None
    size_in_sd: float | None = None
    """For a series, the difference of the runs in standard deviations of a single step's difference, on the series' scale; None
    without noise, and for other kinds."""
    values: Mapping[str, Measured] = field(default_factory=dict)
    """Further numbers: shares, counts, the largest difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Result):
    """Differences between two runs, earliest first."""

    _text = "tim_trace.analysis.comparison.text:comparison_text"

    a: str
    b: str
    pair: str
    """Passes of the mismatch, as a:b."""
    steps: str = ALL_STEPS
    """The `steps` option as given."""
    num_steps: int
    """Number of steps with sequences in both runs."""
    differences: tuple[RunDifference, ...]
    """Sorted by first step, then kind; series by size."""
    same: tuple[str, ...]
    """Series that are bitwise equal at every shared step."""
    within_scatter: tuple[str, ...]
    """Series that differ within noise."""
    note_codes: tuple[Statement, ...] = ()
    """What could not be compared; codes of text.NOTES."""

    @property
    def first(self) -> RunDifference | None:
        """First difference; None if there is none."""
        return self.differences[0] if self.differences else None
