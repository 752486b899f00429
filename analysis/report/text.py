"""Every sentence of a report, from the codes and numbers of its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...schemas.passes import REPLAY_PREFIX
from ..alarms.text import alarm_sentence
from ..attribution.attribution import Attribution
from ..attribution.silent import SilentChange
from ..check.result import CheckResult
from ..check.text import evidence_text
from ..diagnosis.diagnosis import Diagnosis, ReplayEffect
from ..diagnosis.text import cause_title, effect_text, numerics_text, size_text, story, story_of_run
from ..dynamics.changes import ChangePoint
from ..info import TraceInfo
from ..location import Location
from ..objective.judged import Estimate, Objective
from ..token_samples.token_sample import TokenSample

QUESTIONS = {
    "validity": "Is the comparison valid?",
    "factor": "Which factor makes the mismatch?",
    "size": "Is its size normal?",
    "objective": "Did it bend the objective?",
    "fall": "Did the run fall, and why?",
}
"""Code of a question -> the question."""

EFFECTS = {
    "undecided": "whether it pushes one way cannot be told",
    "negligible": "next to nothing",
    "noise": "noise",
    "large_noise": "noise, and a large one",
    "small_push": "a small push one way",
    "small_push_large_noise": "a small push one way, large noise",
    "large_push": "a large push one way",
    "opposed": "no direction: without the clip it has the other sign",
    "in_ratio": "in the ratio itself, where clip and weights see it",
}
"""Code of what the mismatch does to the objective -> what it is."""

SIZES = {
    "equal": "there is no mismatch",
    "unpublished": "not published for these dtypes",
    "above": "larger than published ones",
    "within": "normal",
    "below": "normal",
    "not_valid": "cannot be told before the comparison is valid",
}
"""Code of a size -> what it is."""

_MOST_STEPS = 12
"""Steps that are named one by one."""


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
        basis="what logprobs and contracts show; a replay would settle it" if found.next else "as far as logprobs show",
        detail=numerics_text(found.numerics),
    )


def settled_factor(found: Diagnosis, replay: ReplayEffect) -> AnswerText:
    return AnswerText(
        short=f"settled by a replay: {replay.arm}",
        figure=f"{replay.removed:.1%} of the mean square of d removed",
        basis=f"{replay.num_tokens:,} tokens replayed",
        detail=f"{effect_text(replay)}. {numerics_text(found.numerics)}",
    )


def size(found: Diagnosis, code: str) -> AnswerText:
    alarms = [alarm_sentence(each) for each in found.alarms.raised]
    return AnswerText(
        short=SIZES[code],
        figure=f"{len(alarms)} of {len(found.alarms.judged)} alarms sound",
        basis="" if code == "unpublished" else "against what others measured with these dtypes",
        detail=size_text(found.size, is_valid=found.checked.is_valid)
        + (f" Sounding: {'; '.join(alarms)}." if alarms else ""),
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
    return f"{confidence:.0%} interval {_percent(estimate.low, '+')} to {_percent(estimate.high, '+')}"


# --- fall ---------------------------------------------------------------------------------------------------------------


def no_fall(found: Attribution) -> AnswerText:
    return AnswerText(
        short="it did not fall",
        basis=f"{found.num_steps:,} steps",
        detail=found.sentence,
    )


def no_numbers(found: Attribution) -> AnswerText:
    first = found.not_finite[0]
    return AnswerText(
        short=f"{', '.join(each.series for each in found.not_finite)} NaN or infinite to the end",
        figure=f"from step {first.step} on",
        basis=f"{found.num_steps:,} steps",
        detail=found.sentence,
    )


def unseen_fall(silent: SilentChange, found: Attribution) -> AnswerText:
    first = silent.suspects[0]
    return AnswerText(
        short=f"not seen, but the recorded reward no longer tells: {first.title}",
        figure=f"from step {silent.step} (interval {silent.low} to {silent.high})",
        basis=f"{first.probability:.0%} by {found.kind}" + (" of one run" if found.control is None else ""),
        detail=found.sentence,
    )


def fall(found: Attribution, checked: CheckResult | None) -> AnswerText:
    fall, first = found.fall, found.first_suspect or found.suspects[0]
    assert fall is not None
    low, high = fall.interval
    return AnswerText(
        short=f"it fell: {'first suspect: ' if not found.cause and first.code != 'unknown' else ''}{cause_title(first, checked)}",
        figure=f"{fall.outcome} {fall.before:.3g} to {fall.after:.3g}, from step {fall.step} (95 % interval {low} to {high})",
        basis=f"{first.probability:.0%} by {found.kind}" + (" of one run" if found.control is None else ""),
        detail=found.sentence,
    )


def unknown(detail: str, short: str = "cannot be told") -> AnswerText:
    return AnswerText(short=short, detail=detail)


# --- the first screen ---------------------------------------------------------------------------------------------------


def headline(diagnosis: Diagnosis | None, attribution: Attribution | None) -> str:
    """The story of a run, which is also the first line of `diagnose`."""
    if diagnosis is not None:
        return story(diagnosis)
    return "Nothing can be said of this run." if attribution is None else story_of_run(attribution, None)


def recorded(held: TraceInfo) -> tuple[str, ...]:
    """What a trace holds, a line each."""
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
    """Where a series changed."""
    what = "jumps" if one.kind == "shift" else "bends"
    return f"{what} at step {one.step} ({one.low} to {one.high}): {one.before:.3g} to {one.after:.3g}"


def not_finite(steps: Sequence[int]) -> str:
    """Steps at which NaN or an infinity was recorded: a line has no place for them."""
    if not len(steps):
        return ""
    told = ", ".join(str(step) for step in steps[:_MOST_STEPS])
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return f"NaN or infinite at step{'s' if len(steps) > 1 else ''} {told}{more}."


def published(low: float, high: float, sources: Sequence[str]) -> str:
    """A range that others measured."""
    return f"published for these dtypes: {low:g} to {high:g} ({', '.join(dict.fromkeys(sources))})"


def replayed(one: ReplayEffect) -> str:
    return f"{effect_text(one)} ({one.num_tokens:,} tokens)"


def idle(names: Sequence[str], num: int) -> str:
    """Corrections that would do nothing."""
    return f"{len(names)} of {num} would cut and lower nothing: {', '.join(names)}." if names else ""


def steps_read(num_read: int, num_steps: int) -> str:
    """Which steps of a run a result is of."""
    if num_read < num_steps:
        return f"{num_read} of {num_steps} steps, evenly spread"
    return f"all {num_steps:,} steps" if num_steps > 1 else "its one step"


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
    "Natural logarithm of how much likelier a token is under the policy that is trained than under the one that sampled it "
    "(before), and of the ratio that the loss uses after its clipping (after). The grey bins hold everything beyond."
)
PROFILES = {
    "position": (
        "Mean |d| by position in the response", "position of the token, from 1",
        "Flat for rounding. A step upwards at one position is a cache, a window or a rotary embedding that goes wrong there.",
    ),
    "length": (
        "Mean |d| by length of the response", "tokens of the response", "Whether long responses are worse token by token.",
    ),
    "entropy": (
        "Mean |d| by entropy", "entropy of the next-token distribution, nats",
        "A mismatch that grows with the entropy comes from uncertain tokens, as rounding does.",
    ),
}  # fmt: skip
"""Axis of breakdowns -> title, label and note of its chart."""
RATIO_SPLIT = (
    "Variance over tokens of the two parts of ln ratio: the mismatch d = train - rollout, and the policy's drift "
    "= current - train. Off-policy drift is wanted and clipped; mismatch is neither."
)
BIAS = (
    "b is the contribution of a token under the ratio that the loss uses, less that under the true one; both "
    "sums are over the sum of |f|, the size of the objective's terms. Above 0 the loss sees more objective than there "
    "is. Where the sum is small beside the sum of |b|, the errors cancel (arXiv 2605.14220)."
)


LOCATED_RATIO = (
    "The largest error that an operator itself introduces, held against float64 on its own inputs, in units of what rounding can do "
    "in its dtype. What came before it does not count. Above 1 the operator computes something else."
)
LOCATED_DEPTH = "Root mean square of the difference of both executions' hidden states, relative to those of a, where each layer begins."
LOCATED_CARRIED = (
    "The hidden states' errors along the direction that moves the tokens' logprobs, by one backward pass: what the operators' own errors "
    "up to a layer add to the gap's mean square, to first order. What lies before and behind all layers is left out."
)
LOCATED_PATCHES = (
    "One execution computes these operators by the other's code, on its own inputs: 1 means that the gap is gone then. Lines are "
    "95 % intervals over prompts."
)


def located(found: Location) -> str:
    """What was located."""
    return f"a is {found.a}, b is {found.b}; step {found.step}, {found.num_sequences} sequences."


def density_note(envelope: float | None) -> str:
    rounding = "" if envelope is None else (
        f"Rounding of logits moves d by at most a constant times 1 - p (arXiv 2512.23087): the lines are +-{envelope:.3g} (1 - p), "
        "within which 99 % of the tokens below p = 0.99 lie. "
    )  # fmt: skip
    return (
        f"Each cell counts tokens. {rounding}What lies far out at p near 1 is no rounding. The outermost rows hold everything "
        "beyond."
    )


def arms_note(a: str, b: str) -> str:
    return (
        f"The replay takes the place of {a}: 1 means that it agrees with {b} then, 0 that it changes nothing, below 0 that "
        "it lies further away. Lines are 95 % intervals over groups of sequences."
    )


def corrections_note(part: str) -> str:
    return (
        f"Cut: weight 0. Lowered: the weight is held at its bound. Of {part}. How much it would help is another question: see "
        "docs/evidence/remedies.md."
    )
