"""How a run moved, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ..check.text import wrapped
from ..main_columns import MAIN_COLUMNS
from ..rows import Rows, shown, table, to_text
from .motion import Dynamics

_MOST_PAIRS = 8


def dynamics_text(found: Dynamics, width: int | None = None) -> str:
    """Write it for reading: the answer, the onsets, the series, the length schedule, leads and lags, laws, what is open."""
    found = shown(found)
    head = f"{found.run}: steps {found.first_step} to {found.last_step}, {found.num_steps:,} of them, d = {found.pair}"
    parts = [wrapped(head, "", width), *(wrapped(sentence, "", width) for sentence in found.says)]
    if found.onsets:
        parts.append(_titled("WHAT MOVED FIRST?", to_text(_onsets(found), width, MAIN_COLUMNS["onsets"])))
    parts.append(_titled("WHAT DID EACH SERIES DO?", to_text(series_rows(found), width, MAIN_COLUMNS["series"])))
    if found.schedule is not None:
        parts.append(_titled("DID RESPONSES SURGE?", _schedule(found, width)))
    if found.lead_lag:
        note = "Correlations of step-to-step changes. With one run this is description, not causation."
        parts.append(
            _titled("WHAT GOES AHEAD OF WHAT?", wrapped(note, "", width) + "\n\n" + to_text(_pairs(found), width))
        )
    if laws := _laws(found):
        parts.append(_titled("WHICH LAWS HOLD?", "\n".join(wrapped(law, "", width) for law in laws)))
    if found.unanswered:
        parts.append(_titled("WHAT IS OPEN?", "\n".join(wrapped(each, "", width) for each in found.unanswered)))
    return "\n\n".join(parts)


def dynamics_json(found: Dynamics) -> dict[str, Any]:
    """The same as JSON can say it, with every number."""
    return asdict(found)


def _titled(title: str, text: str) -> str:
    return f"\n{title}\n\n{text}"


def _onsets(found: Dynamics) -> Rows:
    return Rows(
        ("series", "kind", "step", "95 %", "how", "before", "after", "sd", "may be first", "order not decided with"),
        [
            (
                o.name, o.kind, o.change.step, f"{o.change.low} to {o.change.high}", o.change.kind, o.change.before,
                o.change.after, o.change.size_in_sd, "yes" if o.may_be_first else "", ", ".join(o.undecided),
            )
            for o in found.onsets
        ],
    )  # fmt: skip


def series_rows(found: Dynamics) -> Rows:
    """A row a series: its course, and where it changed."""
    rows = [
        (
            each.name, each.num_steps, each.first, each.last, each.smallest, each.largest,
            ", ".join(str(change.step) for change in each.changes[:8]), each.source + _broken(each.not_finite),
        )
        for each in found.series
    ]  # fmt: skip
    return Rows(("series", "steps", "first tenth", "last tenth", "smallest", "largest", "changes at", "of"), rows)


def _broken(steps: tuple[int, ...]) -> str:
    return f"; NaN or infinite in {len(steps)} steps, first {steps[0]}" if steps else ""


def _schedule(found: Dynamics, width: int | None) -> str:
    schedule = found.schedule
    assert schedule is not None
    if schedule.surge_step is None:
        head = "No: the schedule of arXiv 2602.01826 would have left the learning rate alone."
    else:
        steps = ", ".join(
            f"{decay.step} (to {decay.scale:g}{'' if decay.is_within_run else ', after the run'})"
            for decay in schedule.decays
        )
        head = f"At step {schedule.surge_step}. Decay period {schedule.decay_period} steps; it would have acted at {steps}."
    return wrapped(head, "", width) + "\n\n" + to_text(table(schedule.sensitivity), width)


def _pairs(found: Dynamics) -> Rows:
    return Rows(
        ("leader", "follower", "lag", "correlation", "p", "q", "steps"),
        [(r.leader, r.follower, r.lag, r.correlation, r.p, r.q, r.num_steps) for r in found.lead_lag[:_MOST_PAIRS]],
    )


def _laws(found: Dynamics) -> list[str]:
    told = []
    for each in found.growth:
        rate = f"k3 grows by {each.growth:.3%} a step over the {each.part} (slope of ln k3 {each.slope:.3g}, "
        doubling = "" if each.doubling is None else f"; a factor of 2 every {each.doubling:.4g} steps"
        told.append(rate + f"95 % interval {each.low:.3g} to {each.high:.3g}{doubling}).")
    law = found.entropy_law
    if law is not None and not math.isnan(law.r2):
        told.append(
            f"reward = {-law.a:.3g} exp(entropy) {law.b:+.3g} explains {law.r2:.0%} of the reward's variance (arXiv "
            f"2505.22617); the last third of the run lies {law.residual_last_third:+.2f} sd of the residuals off it."
        )
    return told
