"""Render every sentence of a report from the codes and numbers of its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...schemas.passes import REPLAY_PREFIX
from ..alarms.text import alarm_sentence, fired
from ..attribution.attribution import Attribution
from ..attribution.silent import SilentChange
from ..attribution.text import verdict_sentence
from ..check.result import CheckResult
from ..check.text import evidence_text
from ..diagnosis.diagnosis import Diagnosis, ReplayEffect
from ..diagnosis.text import cause_title, effect_text, numerics_text, size_text, story, story_of_run
from ..facts.change_text import interval_text
from ..facts.changes import ChangePoint
from ..info import TraceInfo
from ..location import Location
from ..objective.judged import Estimate, Objective
from ..token_samples.token_sample import TokenSample

QUESTIONS = {
    "validity": "Is the comparison valid?",
    "factor": "What causes the mismatch?",
    "size": "Is its size normal?",
    "objective": "Did it bias the objective?",
    "fall": "Did the run collapse, and why?",
}
"""Code of a question -> the question."""

EFFECTS = {
    "undecided": "bias not measurable",
    "negligible": "negligible",
    "noise": "noise, no measurable bias",
    "large_noise": "large noise, no measurable bias",
    "small_push": "small bias",
    "small_push_large_noise": "small bias, large noise",
    "large_push": "large bias",
    "opposed": "no clear direction: without the clip the sign flips",
    "in_ratio": "part of the ratio, so clipping and weights see it",
}
"""Code of the effect on the objective -> its name."""

SIZES = {
    "equal": "no mismatch",
    "unpublished": "no published value for these dtypes",
    "above": "above the published range",
    "within": "normal",
    "below": "normal",
    "not_valid": "unknown until the comparison is valid",
}
"""Code of a size -> its name."""

_MOST_STEPS = 12
"""Maximum number of steps listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerText:
    """The words of an answer."""

    short: str
    """In a few words."""
    figure: str = ""
    """The number that it rests on, with its unit; empty where there is none."""
    basis: str = ""
    """How far it can be trusted: tokens, an interval, a probability."""
    detail: str
    """The evidence, in the words of the command that found it."""


# --- validity, factor, size -------------------------------------------------------------------------------------------------


def validity(checked: CheckResult) -> AnswerText:
    first = checked.findings[0]
    if checked.num_sampled_tokens >= checked.num_tokens:
        basis = f"all {checked.num_tokens:,} tokens inspected individually"
    else:
        basis = (
            f"{checked.num_tokens:,} tokens (statistics on all, {checked.num_sampled_tokens:,} inspected individually)"
        )
    return AnswerText(
        short="valid" if checked.is_valid else f"not valid: {first.title}",
        figure=f"{checked.rms_d:.3g} nats rms between {checked.pair.replace(':', ' and ')}",
        basis=basis,
        detail=evidence_text(first),
    )


def factor(found: Diagnosis) -> AnswerText:
    first = found.checked.findings[0]
    size = f"{first.effect:.3g} nats rms on " if math.isfinite(first.effect) else ""
    return AnswerText(
        short=first.title,
        figure=f"{size}{first.share:.1%} of the tokens",
        basis="from logprobs and contracts; a replay would confirm it" if found.next else "from logprobs",
        detail=numerics_text(found.numerics),
    )


def settled_factor(found: Diagnosis, replay: ReplayEffect) -> AnswerText:
    return AnswerText(
        short=f"confirmed by a replay: {replay.arm}",
        figure=f"{replay.removed:.1%} of the mean square of d removed",
        basis=f"{replay.num_tokens:,} tokens replayed",
        detail=f"{effect_text(replay)}. {numerics_text(found.numerics)}",
    )


def size(found: Diagnosis, code: str) -> AnswerText:
    alarms = [alarm_sentence(each) for each in found.alarms.raised]
    return AnswerText(
        short=SIZES[code],
        figure=fired(len(alarms), len(found.alarms.judged)),
        basis="" if code == "unpublished" else "compared with published values for these dtypes",
        detail=size_text(found.size, is_valid=found.checked.is_valid)
        + (f" Fired: {'; '.join(alarms)}." if alarms else ""),
    )


# --- objective ----------------------------------------------------------------------------------------------------------


def effect(found: Objective, code: str, relative: Estimate, unclipped: Estimate | None, part: str) -> AnswerText:
    value, most = relative.value or 0.0, abs(found.value("relative_abs_bias") or 0.0)
    interval = _interval(relative, found.confidence)
    free = ""
    if unclipped is not None and unclipped.value is not None:
        free_interval = _interval(unclipped, found.confidence)
        free = f"{_percent(unclipped.value, '+')} without the clip{f' ({free_interval})' if free_interval else ''}"
    return AnswerText(
        short=EFFECTS[code],
        figure=f"{_percent(value, '+')} of sum |f|, {_percent(most)} without cancelling{f', {free}' if free else ''}",
        basis=f"{interval or f'no interval: {relative.no_interval}'}, {part}",
        detail=" ".join(found.verdict),
    )


def in_ratio(found: Objective, part: str) -> AnswerText:
    return AnswerText(
        short=EFFECTS["in_ratio"],
        figure=f"{found.value('mean_abs_d') or 0.0:.3g} nats mean |d| in the ratio",
        basis=part,
        detail=" ".join(found.verdict),
    )


def no_effect(found: Objective | None, why: str) -> AnswerText:
    detail = " ".join((*found.verdict, *found.cannot)) if found else why
    return unknown(detail)


def _percent(share: float, sign: str = "") -> str:
    return f"{share * 100:{sign}.3g}%"


def _interval(estimate: Estimate, confidence: float) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{confidence:.0%} CI {_percent(estimate.low, '+')} to {_percent(estimate.high, '+')}"


# --- fall ---------------------------------------------------------------------------------------------------------------


def no_fall(found: Attribution) -> AnswerText:
    return AnswerText(
        short="no collapse",
        basis=f"{found.num_steps:,} steps",
        detail=verdict_sentence(found),
    )


def no_numbers(found: Attribution) -> AnswerText:
    first = found.not_finite[0]
    return AnswerText(
        short=f"{', '.join(each.series for each in found.not_finite)} NaN or infinite to the end",
        figure=f"from step {first.step} on",
        basis=f"{found.num_steps:,} steps",
        detail=verdict_sentence(found),
    )


def unseen_fall(silent: SilentChange, found: Attribution) -> AnswerText:
    first = silent.suspects[0]
    return AnswerText(
        short=f"not detected, but the recorded reward is no longer meaningful: {first.title}",
        figure=f"from step {silent.step} (interval {silent.low}-{silent.high})",
        basis=f"{first.probability:.0%} by {found.kind}" + (" of one run" if found.control is None else ""),
        detail=verdict_sentence(found),
    )


def fall(found: Attribution, checked: CheckResult | None) -> AnswerText:
    fall, first = found.fall, found.first_suspect or found.suspects[0]
    assert fall is not None
    return AnswerText(
        short=f"it collapsed: {'first suspect: ' if not found.cause and first.code != 'unknown' else ''}{cause_title(first, checked)}",
        figure=f"{fall.outcome} {fall.before:.3g} to {fall.after:.3g}, from step {fall.step}{interval_text(*fall.interval)}",
        basis=f"{first.probability:.0%} by {found.kind}" + (" of one run" if found.control is None else ""),
        detail=verdict_sentence(found),
    )


def unknown(detail: str, short: str = "unknown") -> AnswerText:
    return AnswerText(short=short, detail=detail)


# --- the first screen ---------------------------------------------------------------------------------------------------


def headline(diagnosis: Diagnosis | None, attribution: Attribution | None) -> str:
    """The story of a run, which is also the first line of `diagnose`."""
    if diagnosis is not None:
        return story(diagnosis)
    return "This trace has nothing to analyze." if attribution is None else story_of_run(attribution, None)


def recorded(held: TraceInfo) -> tuple[str, ...]:
    """List what a trace holds."""
    steps = f"{held.num_steps:,} step{'s' if held.num_steps != 1 else ''}"
    if held.num_steps:
        steps += f" ({held.first_step} to {held.last_step})" if held.num_steps > 1 else f" ({held.first_step})"
    told = [f"{steps}, {held.num_sequences:,} sequences, {held.num_response_tokens:,} response tokens"]
    told += [
        f"pass {each.name}: {each.num_sequences:,} sequences{f' by {each.engine}' if each.engine else ''}"
        for each in held.passes
        if each.num_rows and not each.name.startswith(REPLAY_PREFIX)
    ]
    arms = [each.name.removeprefix(REPLAY_PREFIX) for each in held.passes if each.name.startswith(REPLAY_PREFIX)]
    if arms:
        told.append(f"{len(arms)} replay{'s' if len(arms) > 1 else ''}: {', '.join(arms)}")
    if held.num_metrics:
        told.append(f"{held.num_metrics:,} logged values")
    if held.num_bytes.get("weights"):
        told.append(f"weights of the policy, {held.num_bytes['weights'] / 1e6:,.1f} MB")
    return tuple(told)


# --- figures and tokens -------------------------------------------------------------------------------------------------


def change(one: ChangePoint) -> str:
    """Say where a series changed."""
    what = "jumps" if one.kind == "shift" else "changes slope"
    return f"{what} at step {one.step}{interval_text(one.low, one.high)}: {one.before:.3g} to {one.after:.3g}"


def not_finite(steps: Sequence[int]) -> str:
    """List the steps with NaN or an infinity, which a chart cannot draw."""
    if not len(steps):
        return ""
    told = ", ".join(str(step) for step in steps[:_MOST_STEPS])
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return f"NaN or infinite at step{'s' if len(steps) > 1 else ''} {told}{more}."


def published(low: float, high: float, sources: Sequence[str]) -> str:
    """Name a published range and its sources."""
    return f"published for these dtypes: {low:g} to {high:g} ({', '.join(dict.fromkeys(sources))})"


def replayed(one: ReplayEffect) -> str:
    return f"{effect_text(one)} ({one.num_tokens:,} tokens)"


def idle(names: Sequence[str], num: int) -> str:
    """Name the corrections that would have no effect."""
    return f"{len(names)} of {num} would have no effect: {', '.join(names)}." if names else ""


def steps_read(num_read: int, num_steps: int) -> str:
    """Say which steps of a run a result covers."""
    if num_read < num_steps:
        return f"{num_read} of {num_steps} evenly spaced steps"
    return f"all {num_steps:,} steps" if num_steps > 1 else "its only step"


def sequence(one: TokenSample) -> str:
    """A sequence in a line."""
    told = [
        f"{one.num_tokens:,} tokens",
        "" if one.reward is None else f"reward {one.reward:.4g}".replace("nan", "NaN"),
        "" if one.advantage is None else f"advantage {one.advantage:.4g}".replace("nan", "NaN"),
        "" if one.max_abs_d is None else f"largest |d| {one.max_abs_d:.4g}",
        "" if one.sum_d is None else f"sum of d {one.sum_d:.4g} nats",
        "" if one.policy_version is None else f"policy version {one.policy_version}",
        "" if one.finish_reason is None else f"ended by {one.finish_reason}",
        "" if one.group_id is None else f"group {one.group_id}",
    ]
    return ", ".join(each for each in told if each)


RATIO = (
    "Natural log of the probability ratio of each token, trained policy over sampling policy (before), and of the ratio the "
    "loss uses after clipping (after). The grey bins hold everything outside the axis."
)
PROFILES = {
    "position": (
        "Mean |d| by position in the response", "position of the token, from 1",
        "Rounding gives a flat line. A jump at one position points to a cache, an attention window or a rotary embedding.",
    ),
    "length": (
        "Mean |d| by length of the response", "tokens of the response", "Shows whether tokens of long responses differ more.",
    ),
    "entropy": (
        "Mean |d| by entropy", "entropy of the next-token distribution, nats",
        "A mismatch that grows with entropy comes from uncertain tokens, as expected of rounding.",
    ),
}  # fmt: skip
"""Axis of breakdowns -> title, label and note of its chart."""
RATIO_SPLIT = (
    "Variance over tokens of the two parts of ln ratio: the mismatch d = train - rollout, and the policy's drift "
    "= current - train. Drift is intended and clipped; mismatch is neither."
)
BIAS = (
    "b is a token's contribution to the objective under the ratio the loss uses, minus its contribution under the true ratio. Both "
    "sums are divided by the sum of |f|, the size of the objective's terms. Above 0 the loss overstates the objective. "
    "If the sum is small compared with the sum of |b|, the errors cancel (arXiv 2605.14220)."
)


LOCATED_RATIO = (
    "The largest error each operator introduces, measured against float64 on the operator's own inputs, in units of the rounding error "
    "its dtype allows. Errors of earlier operators do not count. Above 1 the operator computes something different."
)
LOCATED_DEPTH = "Root mean square difference of the two executions' hidden states at the input of each layer, relative to execution a."
LOCATED_CARRIED = (
    "How much the operators' own errors up to a layer add to the mean square of the mismatch, to first order: hidden-state errors along "
    "the gradient of the tokens' logprobs, from one backward pass. Operators outside the layers are left out."
)
LOCATED_PATCHES = (
    "One execution runs these operators with the other's code, on its own inputs: 1 means that the mismatch is gone. Lines are "
    "95% CIs over prompts."
)


def located(found: Location) -> str:
    """Say what was located."""
    return f"a: {found.a}, b: {found.b}; step {found.step}, {found.num_sequences} sequences."


def density_note(envelope: float | None) -> str:
    rounding = "" if envelope is None else (
        f"Rounding of logits changes d by at most a constant times 1 - p (arXiv 2512.23087). The lines are +-{envelope:.3g} (1 - p) "
        "and enclose 99% of the tokens below p = 0.99. "
    )  # fmt: skip
    return (
        f"Each cell counts tokens. {rounding}Large |d| at p near 1 is not rounding. The outermost rows hold everything outside "
        "the axis."
    )


def arms_note(a: str, b: str) -> str:
    return (
        f"The replay replaces {a}: 1 means it agrees with {b}, 0 that it changes nothing, below 0 that the mismatch grows. "
        "Lines are 95% CIs over groups of sequences."
    )


def corrections_note(part: str) -> str:
    return (
        f"Cut: weight 0. Lowered: weight clamped to its bound. Computed on {part}. For how much a correction helps, see "
        "docs/evidence/remedies.md."
    )
