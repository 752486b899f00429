from __future__ import annotations

from ..finding import Fault, Finding
from ..where import where_text
from . import kinds, misplaced, not_computed, sampling, values

_MODULES = (sampling, misplaced, values, not_computed, kinds)
ALL = tuple(
    {each.title: each for module in _MODULES for each in vars(module).values() if isinstance(each, Fault)}.values()
)

FAULTS = {fault.code: fault.title for fault in reversed(ALL) if fault.broken}
"""Fault code -> title. With any of these faults, the mismatch does not measure numerical error."""
HEALTHY = {fault.code: fault.title for fault in ALL if not fault.broken}
WEIGHT_CAUSES = dict(kinds.WEIGHTS.causes)
TITLES = FAULTS | HEALTHY | WEIGHT_CAUSES

_BY_SIGNAL = {(fault.code, signal): fault for fault in reversed(ALL) for signal in fault.evidence}


def evidence_text(finding: Finding) -> str:
    text = _BY_SIGNAL[finding.code, finding.signal].sentence(
        finding.signal, {**finding.numbers, "effect": finding.effect}
    )
    numbers = finding.numbers

    def place(name: str) -> str:
        where = {key: numbers.get(f"{name}_{key}") for key in ("feature", "kind", "values")}
        return where_text(where) if where["feature"] else ""

    if "rival" in numbers:
        text += f"; second most probable ({numbers['rival_probability']:.0%}): {kinds.TITLES[str(numbers['rival'])]}"
    if "replays" in numbers:
        text += f"; if the trainer replays the engine's expert choices ({numbers['replays']}), they may belong to other tokens"
    if "lagging" in numbers:
        text += f"; {numbers['lagging']:,} sequences have policy versions that differ by {numbers['versions_apart']}, so either an update changes less than rounding, or a recorded version is wrong"
    if "since_step" in numbers:
        text += f"; all affected tokens are at step {numbers['since_step']} or later"
    if "in_steps" in numbers:
        steps = str(numbers["in_steps"])
        text += f"; all affected tokens are at step{'s' if ',' in steps else ''} {steps}"
    if "part_sequences" in numbers:
        which = f", {place('part')}" if place("part") else ""
        text += f"; only {numbers['part_sequences']:,} of {numbers['part_of']:,} sequences are affected{which}"
    if "within_feature" in numbers:
        text += f"; the tokens that rounding cannot explain are {place('within')}"
    if "behind" in numbers:
        text += f"; visible only after correcting for: {TITLES[str(numbers['behind'])]}"
    return f"{text}; expected for the recorded engines, dtypes and versions" if finding.is_declared else text
