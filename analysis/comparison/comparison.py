"""What differs between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..statement import Measured, Statement

KINDS = (
    "steps", "setting", "sampling", "contract", "prompts", "responses", "logprobs", "rewards", "advantages", "lag", "series",
)  # fmt: skip
"""Kinds of a difference, what may cause others first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """One thing in which two runs differ."""

    kind: str
    """Of KINDS."""
    name: str
    """The setting, `pass.field` of a contract, the pass, or the series; empty where the kind says all."""
    step: int
    """The first step at which they differ; of a series the first of the stretch that lies apart beyond its scatter."""
    a: Measured | None
    """What run A has there; of a series its median from there to the next change. None where it has none."""
    b: Measured | None
    size_in_sd: float | None = None
    """Of a series: how far the runs lie apart there, on the series' scale, in standard deviations of a step's difference;
    None where nothing scatters, and of other kinds."""
    values: Mapping[str, Measured] = field(default_factory=dict)
    """What else is known: shares, counts, the largest difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Result):
    """What differs between two runs, the earliest first."""

    _text = "tim_trace.analysis.comparison.text:comparison_text"

    a: str
    b: str
    pair: str
    """a:b of the mismatch."""
    steps: str = ALL_STEPS
    """Which steps were looked at, as they were asked for."""
    num_steps: int
    """Steps with sequences in both."""
    differences: tuple[RunDifference, ...]
    """By the step at which each begins; of one step by its kind, and series by their size."""
    same: tuple[str, ...]
    """Series with the same bits at every step that both have."""
    within_scatter: tuple[str, ...]
    """Series that differ by no more than they scatter."""
    note_codes: tuple[Statement, ...] = ()
    """What could not be held against each other, of text.NOTES."""

    @property
    def first(self) -> RunDifference | None:
        """What differs first; None where nothing does."""
        return self.differences[0] if self.differences else None
