"""One thing that speaks for or against a suspect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that speaks for or against a suspect."""

    sentence: str
    points: float
    """Natural logarithm of the odds that it is worth; negative: it speaks against."""
