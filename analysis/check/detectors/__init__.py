"""Detectors, one per family of faults, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...advice import NOTHING
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import MAX_NOT_LOGPROBS_SHARE, MIN_FALL, MIN_FALL_SCORE, MIN_LOGPROBS
from .alignment import find_retokenised, find_shift
from .broken import find_broken
from .constants import find_constants
from .engine_weights import find_engine_weights
from .equality import find_copied_rows, find_equal
from .grammar import find_grammar
from .log_base import find_unit
from .missing import find_missing
from .numerics import find_low_precision, find_router_flips, precisions
from .pairing import find_row_pairing
from .position_changes import find_onset, find_own_places
from .realigned import realigned
from .shared import find_shared_constants, find_shared_unit
from .subsets import SequencePart, find_group, find_subset, group_of, part_of
from .temperature import find_temperature
from .truncation import find_one_sided
from .unsampled import find_unsampled
from .values import find_constant_rows, find_other_quantity, find_positive, find_unrelated
from .weight_mismatch import find_declared, find_other_weights, logit_mismatch

_ALIGNMENT = (find_shift, find_row_pairing, find_retokenised)
_QUANTITY = (find_broken, find_unrelated)
_SCALE = (find_one_sided, find_onset, find_temperature, find_own_places)
_PARTS = (find_subset, find_low_precision, find_router_flips, find_group)
_STATE = (find_declared, find_other_weights, find_unsampled)

_INSIDE = (find_one_sided, find_onset, find_temperature, find_own_places, find_declared, find_other_weights)
"""Detectors that look for the cause of a mismatch concentrated in part of the data."""

_BEHIND = (find_one_sided, find_temperature, find_other_weights)
"""Detectors run after realigning the values of pass b. Detectors that use pass b's contracts or versions are left out,
because these are not realigned."""


def find(data: PairData) -> list[Finding]:
    """Run the detectors, those that compare bits first and statistical ones last.

    Engine weights known to differ are reported first, and statistical findings that they explain are skipped. Missing
    values, placeholders and tokens sampled under a grammar are then reported and removed. The search ends at the first
    family of faults that explains the remaining mismatch.
    """
    engine = find_engine_weights(data)
    return [*engine, *(each for each in _find(data, is_known=bool(engine)) if each.fails or not engine)]


def _find(data: PairData, *, is_known: bool) -> list[Finding]:
    """Return the findings based on logprobs; `is_known` is True if the engine's weights are known to differ."""
    above = find_positive(data)
    if above and (unit := find_unit(data)):
        return unit
    holes = [finding for finding, _ in above]
    if any(finding.share > MAX_NOT_LOGPROBS_SHARE for finding in holes):
        return holes
    holes += find_missing(data)
    data = _without(data, above)
    grammars = find_grammar(data)
    holes += [finding for finding, _ in grammars]
    data = _without(data, grammars)
    if data.num_kept < MIN_LOGPROBS:
        return holes or _of_few(data)
    if others := find_other_quantity(data):
        return [*others, *holes]
    for find_values in (find_shared_constants, find_constants):
        values = find_values(data)
        holes += [finding for finding, _ in values]
        data = _without(data, values)
    copied = find_copied_rows(data)
    if not copied and (equal := find_equal(data)):
        return [*holes, *(each for each in equal if each.fails or not holes)]
    faults = copied or _first(data, (find_unit, find_shared_unit, find_constant_rows, *_ALIGNMENT))
    if faults:
        return [*faults, *_behind(data, faults[0]), *holes]
    if is_known:
        return [*holes, *_first(data, _SCALE)]
    faults = _first(data, _QUANTITY) or _since(data) or _first(data, (*_SCALE, *_PARTS, *_STATE))
    if not faults:
        return holes or [_rounding(data)]
    for part in (part_of(data), group_of(data)) if faults[0].code == "subset" else ():
        if part is not None and part.finding is faults[0]:
            faults = [*faults, *_causes(data, part)]
    cut = faults[0].code == "truncation" and any(hole.numbers.get("value") == "-inf" for hole in holes)
    return [*faults, *holes] if cut else [*holes, *faults]


def _without(data: PairData, found: Sequence[tuple[Finding, np.ndarray]]) -> PairData:
    for _, explained in found:
        data = data.without(explained)
    return data


def _first(data: PairData, detectors: Sequence[Callable[[PairData], list[Finding]]]) -> list[Finding]:
    for detector in detectors:
        if found := detector(data):
            return found
    return []


def _of_few(data: PairData) -> list[Finding]:
    """Return the findings if fewer than MIN_LOGPROBS tokens are kept: bitwise equality, or too few tokens."""
    equal = [finding for finding in find_equal(data) if not finding.fails]
    return equal or [data.finding("too_few", "too_few", numbers={"num_tokens": data.num_kept, "least": MIN_LOGPROBS})]


def _since(data: PairData) -> list[Finding]:
    """Return the finding that the mismatch grows at a step, and the cause found in the steps from there on, the more
    probable of the two first."""
    part = part_of(data)
    if part is None or part.since is None:
        return []
    causes = _causes(data, part)
    fall, score = (float(part.finding.numbers.get(name) or 0) for name in ("fall", "fall_score"))
    in_cache = fall > MIN_FALL and score > MIN_FALL_SCORE
    return [part.finding, *causes] if in_cache else [*causes, part.finding]


def _causes(data: PairData, part: SequencePart) -> list[Finding]:
    """Return the findings that explain the mismatch in a part of the data."""
    inside = data.without(~part.tokens)
    share = inside.num_kept / max(data.num_kept, 1)
    since = {} if part.since is None else {"since_step": part.since}
    return [
        replace(finding, share=finding.share * share, numbers=finding.numbers | since)
        for finding in _first(inside, _INSIDE)
        if finding.code != part.finding.code
    ]


def _behind(data: PairData, misplaced: Finding) -> list[Finding]:
    """Return the faults that remain after realigning misplaced values.

    These findings have no command to confirm them, because the command would read the trace without the realignment.
    """
    inside = realigned(data, misplaced)
    if inside is None:
        return []
    share = inside.num_kept / max(data.num_kept, 1)
    return [
        replace(
            finding, share=finding.share * share, next=NOTHING, numbers=finding.numbers | {"behind": misplaced.code}
        )
        for finding in _first(inside, _BEHIND)
    ]


def _rounding(data: PairData) -> Finding:
    size, sides = logit_mismatch(data), precisions(data)
    dtypes = {f"dtype_{side}": precision.coarsest for side, precision in zip("ab", sides, strict=True)}
    return data.finding(
        "rounding", "rounding", numbers={"level": size.level, "allowed": size.bound, **data.names, **dtypes}
    )


__all__ = ["find"]
