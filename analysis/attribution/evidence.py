"""One thing that speaks for or against a suspect."""

from __future__ import annotations

from dataclasses import dataclass

from ..statement import Statement
from .text import evidence_sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Statement):
    """One thing that speaks for or against a suspect, with the numbers that were measured: codes of text.EVIDENCE."""

    points: float
    """Natural logarithm of the odds that it is worth; negative: it speaks against."""

    @property
    def sentence(self) -> str:
        """The evidence in words."""
        return evidence_sentence(self)
