"""Suspect: the sampling engine and the trainer disagree under the same weights."""

from __future__ import annotations

from ...dynamics.changes import ChangePoint
from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from ..mismatch import FROM_START, FROM_UPDATES
from .lag import declared_lag, heard
from .timing import AFTER, FIRST, order, rises

_OF_WEIGHTS = ("weights_differ", "change_inside_sequence", "subset")

_OF_SEMANTICS = (
    "temperature",
    "truncation",
    "shift",
    "mask",
    "placeholders",
    "retokenised",
    "log_base",
    "padded_vocabulary",
)


def mismatch(facts: Facts) -> Suspect:
    """What speaks for training-inference mismatch, and which class of it."""
    if facts.gap is None:
        missing = Evidence(sentence="no two passes were recorded, so that no mismatch can be seen", points=0.0)
        return Suspect(code="mismatch", evidence=(missing, t.prior("mismatch")), next=_RECORD)
    evidence = [_size(facts), *_order(facts), *_semantics(facts), *_lag(facts)]
    return Suspect(code="mismatch", detail=kind(facts), evidence=(*evidence, t.prior("mismatch")), next=_next(facts))


_RECORD = "tim-trace record -o RUN -- COMMAND   (with an engine that returns logprobs)"


def kind(facts: Facts) -> str:
    """The class of the mismatch: check's finding, corrected by how the gap went along with the run."""
    first = facts.checked.findings[0] if facts.checked and not facts.checked.is_valid else None
    code = first.code if first else ""
    gap = facts.gap
    if gap is None or code not in (*_OF_WEIGHTS, "copies"):
        return code
    if facts.echo is not None and facts.echo.is_heard:
        return "stale_weights"
    if code == "copies" and gap.begins != FROM_UPDATES:
        return code
    # Weights that no update has seen are alike on both sides, unless one side holds them in fewer bits.
    if gap.begins == FROM_START:
        return "quantised" if code != "change_inside_sequence" else code
    if gap.begins == FROM_UPDATES:
        is_stuck = gap.grows or (facts.echo is not None and facts.echo.is_missed)
        return "partial_sync" if is_stuck else "stale_weights"
    return str(first.numbers.get("cause") or code) if first else code


def _size(facts: Facts) -> Evidence:
    gap = facts.gap
    assert gap is not None
    points = t.of_size(gap.size)
    said = (
        "too small to bend a run"
        if points < 0
        else "large enough to bend a run"
        if points > 0
        else "of a size that may matter"
    )
    return Evidence(sentence=f"where the fall begins mean |d| is {gap.size:.2g} nats: {said}", points=points)


def _largest_rise(facts: Facts) -> ChangePoint | None:
    """The change by which the gap grew most; None where it never grew twofold."""
    changes = rises(facts, "mean_abs_d", 3.0)
    largest = max(changes, key=lambda change: change.after / max(change.before, 1e-12), default=None)
    return largest if largest and largest.after > t.GAP_JUMPS * max(largest.before, 1e-12) else None


def _order(facts: Facts) -> list[Evidence]:
    largest = _largest_rise(facts)
    gap = facts.gap
    if largest is None or gap is None or facts.fall is None:
        return []
    factor = largest.after / max(largest.before, 1e-12)
    said = f"the gap grows {factor:.3g}-fold from step {largest.step} on ({largest.low} to {largest.high})"
    when = order(facts, largest)
    if when == AFTER:
        # What was large before may have done it, whatever followed.
        return [
            Evidence(sentence=f"{said}, after the fall began: it follows", points=-t.STRONG * (gap.size < t.LARGE_GAP))
        ]
    return [Evidence(sentence=f"{said}, {'before the fall' if when == FIRST else 'with the fall'}", points=t.WEAK)]


def _semantics(facts: Facts) -> list[Evidence]:
    if facts.checked is None:
        return []
    finding = facts.checked.findings[0]
    if not finding.fails:
        return [Evidence(sentence=f"check finds {finding.title}", points=-t.WEAK)]
    if finding.code == "row_pairing":
        return []
    if finding.code == "weights_differ" and "stale_weights" in (kind(facts), finding.numbers.get("cause")):
        return []
    return [
        Evidence(sentence=f"check finds: {finding.title}", points=t.MEDIUM if finding.code in _OF_SEMANTICS else t.WEAK)
    ]


def _lag(facts: Facts) -> list[Evidence]:
    """What staleness explains is not the engine's."""
    lag = declared_lag(facts)
    gap = facts.gap
    assert gap is not None
    if lag < 1 and facts.echo is not None and facts.echo.is_heard:
        said = heard(facts.echo)
    elif lag >= 1 and gap.begins != FROM_START:
        said = (
            f"sequences were sampled {lag:g} updates before they were scored, and the gap begins with the first updates"
        )
    elif lag < 1 and kind(facts) == "stale_weights":
        said = "the gap begins with the first updates and then stays what it is, as that of weights behind does"
    else:
        return []
    return [Evidence(sentence=f"{said}: that is staleness", points=-t.STRONG)]


def _next(facts: Facts) -> str:
    finding = facts.checked.findings[0] if facts.checked else None
    if finding is not None and finding.next:
        return finding.next
    steps = facts.fall.step if facts.fall else "all"
    return f"tim-trace triangulate {facts.trace} --steps {steps}"
