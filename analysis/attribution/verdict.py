"""An attribution in a sentence or two."""

from __future__ import annotations

from .attribution import INTERVENTION, Attribution


def sentence(found: Attribution) -> str:
    """What was found, in plain words."""
    if not found.outcome:
        return "It cannot be told whether this run fell: neither a reward nor an evaluation was recorded at three steps or more."
    if found.fall is None:
        return f"No fall: {found.outcome} did not go down for good beyond its noise, so that there is no cause to look for."
    fall = found.fall
    first, last = fall.interval
    where = (
        f"{fall.outcome} {fall.verb} from step {fall.step} on (95 % interval {first} to {last}), {fall.before:.3g} to "
        f"{fall.after:.3g}"
    )
    return f"{where}. {_cause(found)}"


def _cause(found: Attribution) -> str:
    first = found.suspects[0]
    how = (
        "By intervention (the control shares its seeds)" if found.kind == INTERVENTION else "By observation of one run"
        if found.control is None else "By observation of two runs"
    )  # fmt: skip
    innocent = "; not the mismatch" if found.clears_mismatch else ""
    if found.cause is None:
        others = " or ".join(f"{suspect.title} ({suspect.probability:.0%})" for suspect in found.suspects[:2])
        return f"{how} the cause cannot be told from this trace: {others}{innocent}."
    return f"{how} the cause is {first.title} ({first.probability:.0%}){innocent}."
