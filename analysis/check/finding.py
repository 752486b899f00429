"""Findings of a check, as codes and numbers, and the description that each fault gives of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...schemas.passes import CURRENT, ROLLOUT, TRAIN
from ..advice import NOTHING, Advice
from .pair_data import PairData

Number = float | int | str | None

Broken = Literal["recording", "engine", "trainer", "computation", "versions"]
"""What must be fixed. `recording`: the two passes do not hold the same quantity for the same tokens. `engine`, `trainer`:
that side used the wrong weights, cache, experts, context or precision; `computation` if the trace does not show which.
`versions`: nothing must be fixed; the policy versions of engine and trainer differ, as in asynchronous training."""
SIDES: Mapping[str, Broken] = {ROLLOUT: "engine", TRAIN: "trainer", CURRENT: "trainer"}
"""Pass -> what must be fixed if its values are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, or fault-free verdict, found by a check."""

    code: str
    """Code of a fault, or of a fault-free verdict: a key in faults.FAULTS or faults.HEALTHY."""
    signal: str
    """How the fault was detected: a key in the fault's evidence."""
    effect: float
    """Root mean square of d over the affected tokens, nats; NaN if one pass has no values there."""
    share: float
    """Share of the compared tokens that is affected, 0 to 1."""
    weight: float = 1.0
    """Share of the mismatch that the fault explains, 0 to 1. It is 1 if the fault was detected by comparing bits."""
    is_expected: bool = False
    """True if the recorded engines and dtypes explain the finding without a fault. It is reported, but the comparison
    stays valid."""
    next: Advice = NOTHING
    """Command that confirms the finding; empty if nothing is left to confirm."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Fitted or counted values, and the names of the passes concerned."""
    tokens: np.ndarray | None = field(default=None, compare=False, repr=False)
    """[N] bool: the sampled tokens that the finding covers; None once their owners are counted."""
    cause: str = ""
    """Name of the fault."""
    side: Broken | None = None
    """What must be fixed; None for a fault-free verdict."""

    @property
    def title(self) -> str:
        """Name of the fault; for a change in time, with its first step."""
        if self.since is not None:
            before = int(self.numbers.get("last_before") or self.since - 1)
            exact = before == self.since - 1
            return (
                f"the mismatch grows {f'at step {self.since}' if exact else f'between steps {before} and {self.since}'}"
            )
        return self.cause

    @property
    def since(self) -> int | None:
        """First inspected step of a `subset` finding that covers the rest of the run, i.e. of a change in time; None
        otherwise."""
        since = self.numbers.get("since")
        return int(since) if self.code == "subset" and since is not None else None

    @property
    def fails(self) -> bool:
        """True if the finding makes the comparison invalid."""
        return self.side is not None and not self.is_expected

    @property
    def broken(self) -> Broken | None:
        """What must be fixed; None if the finding is not a fault."""
        return self.side if self.fails else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault, or a fault-free verdict, as it describes itself."""

    code: str
    title: str
    """Name of the fault, without a capital."""
    broken: Broken | None
    """What must be fixed; None for a fault-free verdict."""
    evidence: Mapping[str, str]
    """Signal, i.e. way to detect it -> template of the sentence, filled with the numbers of the finding."""
    words: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(default_factory=dict)
    """Signal -> function that derives further words of the template from the numbers."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """Code of a reason that the recording may show, in `numbers["cause"]` -> its name, used as the title."""

    def finding(
        self,
        data: PairData,
        signal: str,
        affected: np.ndarray | None = None,
        *,
        weight: float = 1.0,
        is_expected: bool = False,
        next: Advice = NOTHING,
        broken: Broken | None = None,
        effect: float | None = None,
        share: float | None = None,
        numbers: Mapping[str, Number],
    ) -> Finding:
        """Return a finding about the kept tokens marked in `affected`, [K] bool, or about all kept tokens if that is
        None."""
        if signal not in self.evidence:
            raise KeyError(signal)
        if share is None:
            share = float(np.mean(affected)) if affected is not None and len(affected) else 1.0
            share *= data.num_kept / max(int(data.sample.compared.sum()), 1)
        return Finding(
            code=self.code,
            signal=signal,
            effect=data.rms(affected) if effect is None else effect,
            share=share,
            weight=weight,
            is_expected=is_expected,
            next=next,
            numbers=dict(numbers),
            tokens=data.keep if affected is None else data.marked(affected),
            cause=self.causes.get(str(numbers.get("cause")), self.title),
            side=broken or self.broken,
        )

    def sentence(self, finding: Finding) -> str:
        """Return the evidence for a finding as a sentence with numbers."""
        numbers: dict[str, Any] = {
            **finding.numbers, "code": finding.code, "effect": finding.effect, "share": finding.share,
        }  # fmt: skip
        if finding.signal in self.words:
            numbers |= self.words[finding.signal](numbers)
        return self.evidence[finding.signal].format_map(numbers)
