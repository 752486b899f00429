"""The outcome of a check."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from .finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(Result):
    """What a check of two passes found."""

    _text = "tim_trace.analysis.check.text:checked_text"

    trace: str
    pair: str
    """a:b; d = logprob(a) - logprob(b)."""
    num_tokens: int
    """Tokens that count in the loss and have a finite logprob in both."""
    num_sampled_tokens: int
    """Of those, so many were looked at one by one; the rest in sums."""
    rms_d: float
    """Root mean square of d, nats."""
    findings: tuple[Finding, ...]
    """The most probable first; never empty."""
    notes: tuple[str, ...] = ()
    """What could not be asked of this trace, and why; and which attempts at training were judged, where there are several."""

    @property
    def is_valid(self) -> bool:
        """Whether no fault was found."""
        return not any(finding.fails for finding in self.findings)
