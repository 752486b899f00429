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
    """Kind of the difference, one of KINDS."""
    name: str
    """Name of the setting, contract field (as `pass.field`), pass or series that differs; empty if the kind needs no
    name."""
    step: int
    """First step at which the two runs differ; for a series, the start of the first segment that differs by more than
    noise."""
    a: Measured | None
    """Value in run A at `step`; for a series, its median from `step` to the next change; None if missing."""
    b: Measured | None
    size_in_sd: float | None = None
    """For a series, the mean difference between the runs in standard deviations of a single step's difference, on the
    scale of the series; None if the difference has no noise, and for all other kinds."""
    values: Mapping[str, Measured] = field(default_factory=dict)
    """Further numbers, by name: shares, counts, the largest difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Result):
    """Differences between two runs, earliest first."""

    _text = "tim_trace.analysis.comparison.text:comparison_text"

    a: str
    b: str
    pair: str
    """Names of the passes whose mismatch is compared, as a:b."""
    steps: str = ALL_STEPS
    """The `steps` option as given."""
    num_steps: int
    """Number of steps with sequences in both runs."""
    differences: tuple[RunDifference, ...]
    """Differences sorted by first step, then kind, and for series by size."""
    same: tuple[str, ...]
    """Names of the series that are bitwise equal at every step in both runs."""
    within_scatter: tuple[str, ...]
    """Names of the series whose differences are no larger than noise."""
    note_codes: tuple[Statement, ...] = ()
    """Notes on what could not be compared, as codes in text.NOTES."""

    @property
    def first(self) -> RunDifference | None:
        """Earliest difference; None if the runs do not differ."""
        return self.differences[0] if self.differences else None
