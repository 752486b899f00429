"""The one verb that a newcomer needs: is the comparison valid, which factor is it, is it normal, and what would settle it."""

from __future__ import annotations

import os

from ...tracer.progress import Progress, no_progress
from ..advice import Advice
from ..check import commands
from ..check.check import gather, judge
from ..check.checked import Checked
from ..check.detectors.numerics import Precision, precisions
from ..check.evidence import Evidence
from ..trace.database import Database
from ..trace.pairs import parse_pair
from .alarms import ALARMS
from .diagnosis import ABOVE, BELOW, EQUAL, UNKNOWN, WITHIN, Compared, Diagnosis, Numerics, Settled, Sounded
from .figures import FIGURES
from .metrics import own_metrics
from .settled import settled

_NOT_VALID = "; but it is no matter of numerics as long as the comparison is not valid."


def diagnose(
    trace: str | os.PathLike[str] | Database, *, pair: str = "train:rollout", progress: Progress = no_progress
) -> Diagnosis:
    """Say whether two passes may be compared, which factor lies between them, whether it is normal, and what is open.

    First `check`; then what each side computed in, as contracts say and as the numbers show; then the published figures
    and alarm levels under their own definitions, with the trace's own beside them; then what replays in the trace settled.

    Raises NothingToCompare when the passes share no token, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    database = trace if isinstance(trace, Database) else Database(trace, lean=True)
    evidence = gather(database, names, trace=database.given[0], progress=progress)
    checked = judge(evidence, pair)
    sides = precisions(evidence)
    metrics = own_metrics(evidence)
    figures = _compared(metrics, sides)
    level, normal = _normal(checked, metrics, figures)
    replays = settled(database, names, evidence.passes)
    return Diagnosis(
        checked=checked,
        numerics=_numerics(evidence, sides),
        metrics=metrics,
        level=level,
        normal=normal,
        figures=figures,
        alarms=_alarms(metrics),
        replays=replays,
        next=_next(evidence, checked, replays),
    )


def _numerics(evidence: Evidence, sides: tuple[Precision, Precision]) -> Numerics:
    parts = []
    for side, precision in zip((evidence.sample.a, evidence.sample.b), sides, strict=True):
        seen = {
            None: "too few tokens share a context to show it",
            "float32": "its logits were not rounded to 16 bits",
        }.get(precision.logits, f"its logits lie on the grid of {precision.logits}")
        rounded = (
            f", and its logprobs were rounded to {precision.values}"
            if precision.values not in (None, "float32")
            else ""
        )
        says = f"says {precision.declared}" if precision.declared else "does not say its dtype"
        parts.append(f"{side.name} {says}; {seen}{rounded}")
    return Numerics(
        declared=(sides[0].declared, sides[1].declared),
        logits=(sides[0].logits, sides[1].logits),
        values=(sides[0].values, sides[1].values),
        sentence=". ".join(parts) + ".",
    )


def _compared(metrics: dict[str, float], sides: tuple[Precision, Precision]) -> tuple[Compared, ...]:
    """Figures that the trace has one for; those of its own dtypes first."""
    found = [
        Compared(figure=figure, own=metrics[figure.metric], fits=_fits(figure.dtypes, sides))
        for figure in FIGURES
        if figure.metric in metrics
    ]
    return tuple(sorted(found, key=lambda each: not each.fits))


def _fits(dtypes: tuple[str, str], sides: tuple[Precision, Precision]) -> bool:
    """A gap is as large as its coarser side makes it."""
    order = ("float32", "float16", "bfloat16", "float8")
    known = [side.coarsest for side in sides if side.coarsest in order]
    if not known:
        return False
    return max(known, key=lambda d: order.index(d or "")) == max(dtypes, key=order.index)


def _alarms(metrics: dict[str, float]) -> tuple[Sounded, ...]:
    found = []
    for alarm in ALARMS:
        own = metrics.get(alarm.metric)
        if own is not None:
            size = abs(own) if alarm.of_size else own
            found.append(
                Sounded(alarm=alarm, own=own, sounds=size > alarm.level if alarm.above else size < alarm.level)
            )
    return tuple(found)


def _normal(checked: Checked, metrics: dict[str, float], figures: tuple[Compared, ...]) -> tuple[str, str]:
    """How large it is beside published figures, and the same in words."""
    own = metrics.get("rms_d", 0.0)
    if checked.findings[0].code == "equal":
        return EQUAL, "There is no gap."
    healthy = [
        each.figure for each in figures if each.fits and each.figure.metric == "rms_d" and not each.figure.is_fault
    ]
    if not healthy:
        what = f"No published figure is of this pair of dtypes; the gap is {own:.3g} nats rms"
        return UNKNOWN, what + ("." if checked.is_valid else _NOT_VALID)
    low, high = min(figure.low for figure in healthy), max(figure.high for figure in healthy)
    level = BELOW if own < low else ABOVE if own > high else WITHIN
    what = f"The gap of {own:.3g} nats rms is {level} what others measured with these dtypes ({low:g} to {high:g})"
    if not checked.is_valid:
        return level, what + _NOT_VALID
    return level, f"{what}: {'look for a cause' if level == ABOVE else 'it is normal'}."


def _next(evidence: Evidence, checked: Checked, replays: tuple[Settled, ...]) -> tuple[Advice, ...]:
    """Commands for what is open, and nothing for what a replay has settled."""
    if any(each.settles for each in replays) or checked.findings[0].code == "equal":
        return ()
    found = [finding.next for finding in checked.findings if finding.next]
    if not evidence.has_weights:
        return *found, Advice(commands.RECORD, "this trace has no weights to replay with")
    if checked.is_valid:
        found.append(commands.triangulate(evidence))
    return tuple(found)
