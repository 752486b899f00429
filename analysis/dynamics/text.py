from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from ..facts.recorded import interval_text
from ..rows import MAIN_COLUMNS, Form, Rows, shown, to_text, wrapped
from ..statement import Measured, Statement, sentences
from ..statistics.location import RAMP
from .dynamics import PEAKS, Dynamics, FirstChange

_MOST_NAMED = 3

SUMMARY: Mapping[str, str] = {
    "too_short": "The run is too short to find what changed first (steps recorded: {num_steps}, needed: {min_steps}).",
    "no_change": "No series changed by {min_sd:g} or more standard deviations. Each is flat or follows a straight line.",
    "moved_first": "{onset} changed first{followers}.",
    "first_undecided": "Could not determine which series changed first: {onsets}.",
    "fall": "{outcome} {verb} from {before:.3g} to {after:.3g} after step {step}{interval}. Find the cause with "
    "tim-trace attribute {trace}.",
    "later": "After the selected steps, {outcome} {verb} after step {step}.",
    "planned_change": "The {name} (a setting, not a measurement) changes at step {steps}.",
    "k3_doubles": "In the last third of the run, k3 doubles every {steps:.3g} steps.",
    "k3_halves": "In the last third of the run, k3 halves every {steps:.3g} steps.",
}

UNANSWERED: Mapping[str, str] = {
    "no_mismatch": "the passes {pair} share no token, so the mismatch and its growth are unknown (see tim-trace info)",
    "no_reward": "no rewards: pass reward to Recorder.add_sequences to see the reward and its spread within groups",
    "no_reward_std_within_groups": "no groups with two or more rewards: record group_ids to see the spread within groups",
    "no_k3_positive": "no advantages: pass advantage to Recorder.add_sequences to see the mismatch by advantage sign",
    "no_grad_norm": "no gradient norm: record it with Recorder.add_metrics",
    "no_update_to_weight": "no optimizer statistics: record them with tim-trace record or Recorder.add_optimizer",
    "no_policy_lag": "no policy versions on one or both sides, so the policy lag is unknown",
    "no_clip_share": "no clipped loss, no advantages or no `current` logprobs: record the loss with Recorder.add_loss to "
    "see the clipped share",
    "no_changed_weights": "no weights: record with --weights delta to see how much each update changes",
    "too_short": "steps with a value: {num_steps}; change points need {changes}, and growth rates {rates}",
}


def summary_sentences(found: Dynamics) -> tuple[str, ...]:
    return tuple(SUMMARY[part.code].format(**_numbers(part, found)) for part in found.summary_codes)


def unanswered_sentences(found: Dynamics) -> tuple[str, ...]:
    return sentences(found.unanswered_codes, UNANSWERED)


def _numbers(part: Statement, found: Dynamics) -> dict[str, Measured]:
    numbers = dict(part.values)
    first = [onset_text(onset) for onset in found.onsets if onset.may_be_first]
    if part.code == "moved_first":
        followers = ", ".join(onset.name for onset in found.onsets[1:4])
        numbers |= {"onset": first[0], "followers": f", before {followers}" if followers else ""}
    elif part.code == "first_undecided":
        numbers |= {"onsets": "; ".join(first)}
    elif part.code == "fall" and found.fall is not None:
        fall = found.fall
        numbers |= {"verb": fall.verb, "interval": interval_text(*fall.interval), "trace": shlex.quote(found.trace)}
        numbers |= {"before": fall.before, "after": fall.after}
    elif part.code == "planned_change":
        numbers |= {"name": str(part.values["series"]).replace("_", " ")}
    return numbers


def onset_text(onset: FirstChange) -> str:
    """Describe an onset. `change.after` is the level after a jump, or the final value of a ramp."""
    change = onset.change
    span = f", 95% CI {change.low}-{change.high}" if change.low < change.high else ""
    how = ("rises", "drops") if change.kind != RAMP else ("starts to rise", "starts to drop")
    name = f"{onset.name} at some steps" if change.kind == PEAKS else onset.name
    return f"{name} ({how[change.after < change.before]} at step {change.step}{span}; {change.before:.3g} to {change.after:.3g})"


def dynamics_text(found: Dynamics, width: int | None = None) -> str:
    found = shown(found)
    head = f"{found.run}: {found.num_steps:,} steps ({found.first_step} to {found.last_step}), d = {found.pair}"
    parts = [wrapped(head, "", width), *(wrapped(sentence, "", width) for sentence in summary_sentences(found))]
    if found.onsets:
        parts.append(_titled("WHAT CHANGED FIRST?", to_text(_onsets(found), width, MAIN_COLUMNS["onsets"])))
    parts.append(_titled("HOW DID EACH SERIES CHANGE?", to_text(dynamics_rows(found), width, MAIN_COLUMNS["series"])))
    if found.growth:
        rates = "\n".join(wrapped(sentence, "", width) for sentence in _rates(found))
        parts.append(_titled("HOW FAST DOES THE MISMATCH GROW?", rates))
    if unanswered := unanswered_sentences(found):
        parts.append(_titled("WHAT IS UNKNOWN?", "\n".join(wrapped(each, "", width) for each in unanswered)))
    return "\n\n".join(parts)


DYNAMICS_FORM: Form = {Dynamics: {"summary": summary_sentences, "unanswered": unanswered_sentences}}


def _titled(title: str, text: str) -> str:
    return f"\n{title}\n\n{text}"


def _onsets(found: Dynamics) -> Rows:
    return Rows(
        ("series", "kind", "step", "95%", "how", "before", "after", "sd", "may be first", "order undecided with"),
        [
            (
                o.name, o.kind, o.change.step, _span(o), o.change.kind, o.change.before,
                o.change.after, o.change.size_in_sd, "yes" if o.may_be_first else "", _few(o.undecided),
            )
            for o in found.onsets
        ],
    )  # fmt: skip


def _span(onset: FirstChange) -> str:
    low, high = onset.change.low, onset.change.high
    return str(low) if low == high else f"{low} to {high}"


def _few(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def dynamics_rows(found: Dynamics) -> Rows:
    rows = [
        (
            each.name, each.num_steps, each.first, each.last, each.smallest, each.largest,
            ", ".join(str(change.step) for change in each.changes[:8]), each.source + _broken(each.not_finite),
        )
        for each in found.series
    ]  # fmt: skip
    return Rows(("series", "steps", "first tenth", "last tenth", "smallest", "largest", "changes at", "of"), rows)


def _broken(steps: tuple[int, ...]) -> str:
    return f", NaN or infinite in {len(steps)} steps, first at step {steps[0]}" if steps else ""


def _rates(found: Dynamics) -> Iterator[str]:
    for part in found.growth:
        slope = f"(slope of ln k3 {part.slope:.3g}, 95% CI {part.low:.3g} to {part.high:.3g})"
        if part.low <= 0 <= part.high:
            yield f"k3 has no significant trend over the {part.part} {slope}."
            continue
        verb, times = ("grows", "doubles") if part.slope > 0 else ("shrinks", "halves")
        every = "" if part.doubling is None else f" and {times} every {abs(part.doubling):.3g} steps"
        yield f"k3 {verb} by {abs(part.growth):.2%} per step{every} over the {part.part} {slope}."
