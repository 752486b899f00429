"""Result of a check."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from .data_checks import DataFinding
from .finding import Broken, Finding
from .notes import Note


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult(Result):
    """Result of checking whether two passes may be compared."""

    _text = "tim_trace.analysis.check.text:checked_text"

    trace: str
    pair: str
    """Names of the compared passes, as a:b. d is logprob(a) - logprob(b)."""
    steps: str = ALL_STEPS
    """The `steps` option as given."""
    num_tokens: int
    """Number of tokens that count in the loss and have a finite logprob in both passes."""
    num_sampled_tokens: int
    """Number of compared tokens inspected individually; all other tokens are included only in sums."""
    rms_d: float
    """Root mean square of d over the compared tokens, nats."""
    findings: tuple[Finding, ...]
    """Findings, most probable first; never empty."""
    data: tuple[DataFinding, ...] = ()
    """Faults in rewards, advantages, groups and logged metrics. They do not affect the comparison, which may be valid
    although the training is not.
    """
    notes: tuple[Note, ...] = ()
    """Tests that the trace does not allow, and, if there are several training attempts, which ones are used."""

    @property
    def is_valid(self) -> bool:
        """True if no fault was found."""
        return not any(finding.fails for finding in self.findings)

    @property
    def broken(self) -> Broken | None:
        """What must be fixed according to the most probable fault; None if the comparison is valid."""
        return next((finding.broken for finding in self.findings if finding.fails), None)
