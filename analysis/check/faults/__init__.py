from __future__ import annotations

from ..finding import Finding
from ..where import where_text
from .kinds import (
    BOUNDARY,
    COMPUTATION,
    NOT_REPEATABLE,
    ONE_PLACE,
    ONSET,
    ROUNDING,
    ROUTER_FLIPS,
    ROW_CONTEXT,
    SUBSET,
    TOO_FEW,
    UNEXPLAINED,
)
from .kinds import TITLES as KIND_TITLES
from .misplaced import MISPLACED, RETOKENISED, ROW_PAIRING, SHIFT
from .not_computed import COPIES, EQUAL, HOLES, LENGTHS, MASK, MERGED, NOT_SAMPLED, PLACEHOLDERS, SHIFTED_MASK
from .sampling import GRAMMAR, PADDED_VOCABULARY, PENALTY, SMOOTHED, TEMPERATURE, TRUNCATION
from .values import LOW_PRECISION, NOT_LOGPROBS, UNIT, UNRELATED
from .weights import WEIGHTS

ALL = (
    TEMPERATURE, TRUNCATION, PENALTY, GRAMMAR, SMOOTHED, SHIFT, ROW_PAIRING, MISPLACED, MASK, NOT_SAMPLED, SHIFTED_MASK, PLACEHOLDERS, HOLES, MERGED,
    RETOKENISED, UNIT, NOT_LOGPROBS, UNRELATED, PADDED_VOCABULARY, LENGTHS, COPIES, WEIGHTS, COMPUTATION, NOT_REPEATABLE,
    ROW_CONTEXT, ONSET, BOUNDARY, ONE_PLACE, SUBSET, LOW_PRECISION, ROUTER_FLIPS, UNEXPLAINED, ROUNDING, EQUAL, TOO_FEW,
)  # fmt: skip

FAULTS = {fault.code: fault.title for fault in reversed(ALL) if fault.broken}
"""Fault code -> title. With any of these faults, the mismatch does not measure numerical error."""
HEALTHY = {fault.code: fault.title for fault in ALL if not fault.broken}
WEIGHT_CAUSES = dict(WEIGHTS.causes)
TITLES = FAULTS | HEALTHY | WEIGHT_CAUSES

_BY_SIGNAL = {(fault.code, signal): fault for fault in reversed(ALL) for signal in fault.evidence}


def evidence_text(finding: Finding) -> str:
    text = _BY_SIGNAL[finding.code, finding.signal].sentence(finding)
    if "rival" in finding.numbers:
        text += f"; second most probable ({finding.numbers['rival_probability']:.0%}): {KIND_TITLES[str(finding.numbers['rival'])]}"
    if "since_step" in finding.numbers:
        text += f"; all affected tokens are at step {finding.numbers['since_step']} or later"
    if "in_steps" in finding.numbers:
        steps = str(finding.numbers["in_steps"])
        text += f"; all affected tokens are at step{'s' if ',' in steps else ''} {steps}"
    if "part_sequences" in finding.numbers:
        where = {name: finding.numbers.get(f"part_{name}") for name in ("feature", "kind", "values")}
        which = f", {where_text(where)}" if where["feature"] else ""
        text += f"; only {finding.numbers['part_sequences']:,} of {finding.numbers['part_of']:,} sequences are affected{which}"
    if "within_feature" in finding.numbers:
        where = {name: finding.numbers.get(f"within_{name}") for name in ("feature", "kind", "values")}
        text += f"; the tokens among these that rounding cannot explain are {where_text(where)}"
    if "behind" in finding.numbers:
        text += f"; visible only after correcting for: {TITLES[str(finding.numbers['behind'])]}"
    return f"{text}; expected for the recorded engines, dtypes and versions" if finding.is_expected else text
