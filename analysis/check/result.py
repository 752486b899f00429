"""The outcome of a check."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from .finding import Broken, Finding
from .notes import Note


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult(Result):
    """Findings of a check of two passes."""

    _text = "tim_trace.analysis.check.text:checked_text"

    trace: str
    pair: str
    """a:b; d = logprob(a) - logprob(b)."""
    steps: str = ALL_STEPS
    """The `steps` option as given."""
    num_tokens: int
    """Tokens that count in the loss and have a finite logprob in both passes."""
    num_sampled_tokens: int
    """Number of these inspected individually; the others are included in sums only."""
    rms_d: float
    """Root mean square of d, nats."""
    findings: tuple[Finding, ...]
    """Most probable first; never empty."""
    notes: tuple[Note, ...] = ()
    """Tests this trace does not allow, and the training attempts used if there are several."""

    @property
    def is_valid(self) -> bool:
        """True if no fault was found."""
        return not any(finding.fails for finding in self.findings)

    @property
    def broken(self) -> Broken | None:
        """What is broken according to the most probable fault; None if the comparison is valid."""
        return next((finding.broken for finding in self.findings if finding.fails), None)
