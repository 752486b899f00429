"""Detectors, each of a family of faults, and the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..evidence import Evidence
from ..finding import Finding
from .alignment import find_retokenised, find_shift
from .broken import find_broken
from .constants import find_constants
from .equality import find_copied_rows, find_equal
from .log_base import find_unit
from .missing import find_missing
from .numerics import find_low_precision, find_router_flips, precisions
from .pairing import find_row_pairing
from .position_changes import find_onset, find_own_places
from .subsets import find_group, find_subset
from .temperature import find_temperature
from .truncation import find_one_sided
from .unsampled import find_unsampled
from .weight_mismatch import find_declared, find_other_weights, measure_gap

_ALIGNMENT = (find_shift, find_row_pairing, find_retokenised)
_SCALE = (find_one_sided, find_onset, find_temperature, find_own_places, find_broken)
_PARTS = (find_subset, find_low_precision, find_router_flips, find_group)
_STATE = (find_declared, find_other_weights, find_unsampled)


def find(evidence: Evidence) -> list[Finding]:
    """Ask every detector, from what is seen bit for bit to what only statistics tell.

    Holes (values that are missing or stand for none) are taken out first; of what is left, the first family of faults
    that explains the gap ends the search.
    """
    holes = find_missing(evidence)
    for finding, explained in find_constants(evidence):
        holes.append(finding)
        evidence = evidence.without(explained)
    copied = find_copied_rows(evidence)
    if not copied and (equal := find_equal(evidence)):
        return [*holes, *(each for each in equal if each.fails or not holes)]
    faults = copied or _first(evidence, (find_unit, *_ALIGNMENT))
    if faults:
        return [*faults, *holes]
    faults = holes or _first(evidence, (*_SCALE, *_PARTS, *_STATE))
    return faults or [_rounding(evidence)]


def _first(evidence: Evidence, detectors: Sequence[Callable[[Evidence], list[Finding]]]) -> list[Finding]:
    for detector in detectors:
        if found := detector(evidence):
            return found
    return []


def _rounding(evidence: Evidence) -> Finding:
    sides = precisions(evidence)
    gap = measure_gap(evidence, sides)
    named = " and ".join(
        f"{side.coarsest or 'an unknown dtype'} ({name})"
        for side, name in zip(sides, (evidence.sample.a.name, evidence.sample.b.name), strict=True)
    )
    return Finding(
        code="rounding",
        evidence=f"the logits differ by {gap.level:.2g} nats rms, within {gap.allowed:.2g} that rounding of {named} gives at "
        "most, and no pattern was found in it",
        effect=evidence.rms(),
        share=1.0,
        numbers={"level": gap.level, "allowed": gap.allowed},
    )


__all__ = ["find"]
