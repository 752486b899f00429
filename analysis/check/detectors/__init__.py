"""Detectors, each of a family of faults, and the order in which they are asked."""

from __future__ import annotations

from ..evidence import Evidence
from ..finding import Finding
from .bases import find_unit
from .constants import find_constants
from .equality import find_copied_rows, find_equal
from .missing import find_missing
from .onesided import find_one_sided
from .pairing import find_row_pairing
from .places import find_place
from .shifts import find_retokenised, find_shift
from .subsets import find_subset
from .temperature import find_temperature


def find(evidence: Evidence) -> tuple[list[Finding], list[str]]:
    """Ask every detector, from what is seen bit for bit to what only statistics tell, and stop at what explains the gap."""
    findings: list[Finding] = []
    findings += find_missing(evidence)
    for finding, explained in find_constants(evidence):
        findings.append(finding)
        evidence = evidence.without(explained)
    findings += find_copied_rows(evidence) or find_equal(evidence)
    for detector in (
        find_unit,
        find_shift,
        find_row_pairing,
        find_retokenised,
        find_temperature,
        find_one_sided,
        find_place,
    ):
        if any(each.fails or each.code == "equal" for each in findings):
            break
        findings += detector(evidence)
    if not findings:
        findings += find_subset(evidence)[0]
    if not findings:
        findings.append(Finding(code="rounding", evidence="", effect=evidence.rms(), share=1.0))
    return findings, []


__all__ = ["find"]
