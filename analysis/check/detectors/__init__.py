"""Detectors, each of a family of faults, and the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..finding import Finding
from ..pair_data import PairData
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
from .weight_mismatch import find_declared, find_other_weights, logit_mismatch

_ALIGNMENT = (find_shift, find_row_pairing, find_retokenised)
_SCALE = (find_one_sided, find_onset, find_temperature, find_own_places, find_broken)
_PARTS = (find_subset, find_low_precision, find_router_flips, find_group)
_STATE = (find_declared, find_other_weights, find_unsampled)


def find(data: PairData) -> list[Finding]:
    """Ask every detector, from what is seen bit for bit to what only statistics tell.

    Holes (values that are missing or stand for none) are taken out first; of what is left, the first family of faults
    that explains the mismatch ends the search.
    """
    holes = find_missing(data)
    for finding, explained in find_constants(data):
        holes.append(finding)
        data = data.without(explained)
    copied = find_copied_rows(data)
    if not copied and (equal := find_equal(data)):
        return [*holes, *(each for each in equal if each.fails or not holes)]
    faults = copied or _first(data, (find_unit, *_ALIGNMENT))
    if faults:
        return [*faults, *holes]
    faults = holes or _first(data, (*_SCALE, *_PARTS, *_STATE))
    return faults or [_rounding(data)]


def _first(data: PairData, detectors: Sequence[Callable[[PairData], list[Finding]]]) -> list[Finding]:
    for detector in detectors:
        if found := detector(data):
            return found
    return []


def _rounding(data: PairData) -> Finding:
    size, sides = logit_mismatch(data), precisions(data)
    dtypes = {f"dtype_{side}": precision.coarsest for side, precision in zip("ab", sides, strict=True)}
    return data.finding(
        "rounding", "rounding", numbers={"level": size.level, "allowed": size.allowed, **data.names, **dtypes}
    )


__all__ = ["find"]
