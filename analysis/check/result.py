"""Result of a check, and its limits as codes. The sentences are in text.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..info import AttemptInfo
from .data_checks import DataFinding
from .finding import Broken, Finding
from .pair_data import PairData

FEW_TOKENS = 500
"""Number of tokens below which only gross faults can be detected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A test that the trace does not allow, or a remark on its data."""

    code: str
    """A key in text.NOTES."""
    num_tokens: int
    """Number of tokens compared individually."""
    attempts: tuple[AttemptInfo, ...] = ()
    """All training attempts; empty unless the code is `attempts`."""


def notes(data: PairData) -> list[Note]:
    """Return the notes that apply to a trace."""
    sample = data.sample
    applies = {
        "few_tokens": data.num_kept < FEW_TOKENS,
        "no_contract": not any(sample.a.contracts) or not any(sample.b.contracts),
        "no_entropies": data.entropy is None,
        "few_steps": len(np.unique(sample.steps)) < 3,
        "no_prompts": all(prompt is None for prompt in sample.prompts),
    }
    found = [Note(code=code, num_tokens=data.num_kept) for code, holds in applies.items() if holds]
    if len(data.attempts) > 1:
        found.append(Note(code="attempts", num_tokens=data.num_kept, attempts=data.attempts))
    return found


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
