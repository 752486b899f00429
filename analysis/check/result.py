"""The outcome of a check."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from .finding import Broken, Finding
from .notes import Note


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult(Result):
    """What a check of two passes found."""

    _text = "tim_trace.analysis.check.text:checked_text"

    trace: str
    pair: str
    """a:b; d = logprob(a) - logprob(b)."""
    steps: str = ALL_STEPS
    """Which steps were looked at, as they were asked for."""
    num_tokens: int
    """Tokens that count in the loss and have a finite logprob in both."""
    num_sampled_tokens: int
    """Of those, the tokens that were inspected individually; the others count in sums."""
    rms_d: float
    """Root mean square of d, nats."""
    findings: tuple[Finding, ...]
    """The most probable first; never empty."""
    notes: tuple[Note, ...] = ()
    """What could not be asked of this trace; and which attempts at training were judged, where there are several."""

    @property
    def is_valid(self) -> bool:
        """Whether no fault was found."""
        return not any(finding.fails for finding in self.findings)

    @property
    def broken(self) -> Broken | None:
        """What the most probable fault says is broken; None where the comparison is valid."""
        return next((finding.broken for finding in self.findings if finding.fails), None)
