"""Suspect: the weights that sampled were behind those that were trained."""

from __future__ import annotations

from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from ..mismatch import FROM_START, FROM_UPDATES
from ..staleness import StaleWeights
from .lag import declared_lag, heard, missed


def staleness(facts: Facts) -> Suspect:
    """What speaks for staleness."""
    lag = declared_lag(facts)
    evidence = [*_declared(facts, lag), *_seen(facts, lag)]
    return Suspect(
        code="staleness",
        evidence=(*evidence, t.prior("staleness")),
        next=f"tim-trace replay {facts.trace} --steps {facts.fall.step if facts.fall else 'all'} --weights-version V-1   "
        "(or rerun synchronously: one policy version a step)",
    )


def _declared(facts: Facts, lag: float) -> list[Evidence]:
    if lag < 1:
        return [Evidence(sentence="the trace declares no lag between sampling and scoring weights", points=-t.WEAK)]
    size = facts.gap.size if facts.gap else 0.0
    return [
        Evidence(
            sentence=f"sequences were sampled by weights {lag:g} updates older than those that scored them, "
            f"{size:.2g} nats away (mean |d|)",
            points=t.STRONG + t.of_size(size),
        )
    ]


def _seen(facts: Facts, lag: float) -> list[Evidence]:
    gap = facts.gap
    if gap is None:
        return []
    if facts.echo is not None and lag < 1:
        if facts.echo.is_heard:
            return [_echo(facts.echo, t.of_size(gap.size))]
        if facts.echo.is_missed:
            return [Evidence(sentence=f"{missed(facts.echo)}: no weights that are behind", points=-t.STRONG)]
    if gap.begins == FROM_START:
        return [
            Evidence(
                sentence="the gap is there at the first recorded step already"
                + ("" if lag else ", where no weights can be behind unless the run was resumed"),
                points=-t.MEDIUM,
            )
        ]
    found = [finding.numbers.get("cause") for finding in facts.checked.findings] if facts.checked else []
    if gap.begins == FROM_UPDATES and t.of_size(gap.size) >= 0 and not gap.grows and lag < 1:
        seen = " (check finds stale weights)" if "stale_weights" in found else ""
        return [
            Evidence(
                sentence=f"the gap is not there at first, comes with the first updates and then stays what it is{seen}, "
                "as weights do that are some updates behind",
                points=t.STRONG + max(t.of_size(gap.size), 0.0),
            )
        ]
    return []


def _echo(echo: StaleWeights, of_size: float) -> Evidence:
    """What was seen token by token, as far as the gap is large enough to matter."""
    return Evidence(sentence=heard(echo), points=t.DECISIVE + of_size)
