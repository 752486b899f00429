"""How a run moved, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..check.text import wrapped
from ..rows import Rows, shown, table, to_text
from ..statement import Measured, Statement
from .location import RAMP

if TYPE_CHECKING:
    from .motion import Dynamics
    from .onsets import FirstChange

_MOST_PAIRS = 8

SUMMARY: Mapping[str, str] = {
    "too_short": "What moved first cannot be told: {num_steps} of at least {min_steps} steps were recorded.",
    "no_change": "Nothing changed its course by {min_sd:g} or more standard deviations of its own scatter: a series moves, if at "
    "all, along one straight line.",
    "moved_first": "{onset} moved first{followers}.",
    "first_undecided": "Which moved first is not decided between {onsets}.",
    "fall": "{outcome} {verb} from step {step} on (95 % interval {low} to {high}), {before:.3g} to {after:.3g}: tim-trace "
    "attribute looks for the cause.",
    "planned_change": "The {name}, which is set and not observed, changes its course at step {steps}.",
    "length_surge": "Responses surged at step {step}: the schedule of arXiv 2602.01826 would halve the learning rate every "
    "{decay_period} steps.",
    "k3_doubles": "In the last third of the run k3 doubles every {steps:.3g} steps.",
    "k3_halves": "In the last third of the run k3 halves every {steps:.3g} steps.",
}
"""Code of a part of the answer -> the sentence."""

UNANSWERED: Mapping[str, str] = {
    "no_mismatch": "{pair} share no token: the mismatch and the rate at which it compounds are open; see tim-trace info",
    "no_reward": "no rewards: what the run learned, its spread within groups and the entropy law are open; record them with "
    "Recorder.add_sequences(reward=...)",
    "no_reward_std_within_groups": "no groups of two or more rewards: their spread is open; record group_ids",
    "no_k3_positive": "no advantages: the mismatch by their sign is open; record them with Recorder.add_sequences(advantage=...)",
    "no_grad_norm": "no grad norm was logged: record it with Recorder.add_metrics",
    "no_update_to_weight": "no optimizer statistics: tim-trace record takes them, or Recorder.add_optimizer",
    "no_policy_lag": "no policy versions of both sides: how far the policy ran ahead is open",
    "no_clip_share": "no loss with a clip was recorded, no advantages, or no logprobs inside of it: the clipped share is open; "
    "Recorder.add_loss records the loss",
    "no_changed_weights": "no weights were kept: record with --weights delta to see how much of them each update changes",
    "too_short": "steps with a value: {num_steps}; change points need {changes}, lags {lags}, rates and laws {laws}",
}
"""Code of what is open -> the sentence."""


def summary_sentences(found: Dynamics) -> tuple[str, ...]:
    """The answer in sentences."""
    return tuple(SUMMARY[part.code].format(**_numbers(part, found)) for part in found.summary_codes)


def _numbers(part: Statement, found: Dynamics) -> dict[str, Measured]:
    """What the sentence holds beside the numbers of its code."""
    numbers = dict(part.values)
    first = [onset_text(onset) for onset in found.onsets if onset.may_be_first]
    if part.code == "moved_first":
        followers = ", ".join(onset.name for onset in found.onsets[1:4])
        numbers |= {"onset": first[0], "followers": f", before {followers}" if followers else ""}
    elif part.code == "first_undecided":
        numbers |= {"onsets": "; ".join(first)}
    elif part.code == "fall" and found.fall is not None:
        fall = found.fall
        numbers |= {"verb": fall.verb, "low": fall.interval[0], "high": fall.interval[1]}
        numbers |= {"before": fall.before, "after": fall.after}
    elif part.code == "planned_change":
        numbers |= {"name": str(part.values["series"]).replace("_", " ")}
    return numbers


def onset_text(onset: FirstChange) -> str:
    """An onset in words: a jump takes one step; a ramp's end is where it led to."""
    change = onset.change
    span = f"95 % interval {change.low} to {change.high}" if change.low < change.high else "sure to a step"
    how = "ramps" if change.kind == RAMP else "jumps"
    return f"{onset.name} ({how} at step {change.step}, {span}; {change.before:.3g} to {change.after:.3g})"


def dynamics_text(found: Dynamics, width: int | None = None) -> str:
    """Write it for reading: the answer, the onsets, the series, the length schedule, leads and lags, laws, what is open."""
    found = shown(found)
    head = f"{found.run}: steps {found.first_step} to {found.last_step}, {found.num_steps:,} of them, d = {found.pair}"
    parts = [wrapped(head, "", width), *(wrapped(sentence, "", width) for sentence in found.summary)]
    if found.onsets:
        parts.append(_titled("WHAT MOVED FIRST?", to_text(_onsets(found), width)))
    parts.append(_titled("WHAT DID EACH SERIES DO?", to_text(_series(found), width)))
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
    """The same as JSON can say it, with every number; sentences beside their codes."""
    sentences = {"says": found.summary, "summary": found.summary, "unanswered": found.unanswered}
    return asdict(found) | sentences


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


def _series(found: Dynamics) -> Rows:
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
    if all(setting.surge_step is None for setting in schedule.sensitivity) and schedule.surge_step is None:
        head = f"No: none of {len(schedule.sensitivity)} detector settings sees a surge; the schedule of arXiv 2602.01826 would have left "
        return wrapped(head + "the learning rate alone.", "", width)
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
    laws = []
    for part in found.growth:
        rate = f"k3 grows by {part.growth:.3%} a step over the {part.part} (slope of ln k3 {part.slope:.3g}, "
        doubling = "" if part.doubling is None else f"; a factor of 2 every {part.doubling:.4g} steps"
        laws.append(rate + f"95 % interval {part.low:.3g} to {part.high:.3g}{doubling}).")
    law = found.entropy_law
    if law is not None and not math.isnan(law.r2):
        laws.append(
            f"reward = {-law.a:.3g} exp(entropy) {law.b:+.3g} explains {law.r2:.0%} of the reward's variance (arXiv "
            f"2505.22617); the last third of the run lies {law.residual_last_third:+.2f} sd of the residuals off it."
        )
    return laws
