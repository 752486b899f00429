"""Texts used in reports: notes and marks on charts, and one-line descriptions of sequences."""

from __future__ import annotations

from collections.abc import Sequence

from ..diagnosis.diagnosis import ReplayEffect
from ..diagnosis.text import effect_text
from ..facts.change_text import interval_text
from ..facts.changes import ChangePoint
from ..token_samples.token_sample import TokenSample

_MOST_STEPS = 12
"""Maximum number of steps listed in a chart's note; further steps are only counted."""


def change(one: ChangePoint) -> str:
    """Describe a change in a series."""
    what = "jumps" if one.kind == "shift" else "changes slope"
    return f"{what} at step {one.step}{interval_text(one.low, one.high)}: {one.before:.3g} to {one.after:.3g}"


def not_finite(steps: Sequence[int]) -> str:
    """Return a sentence that lists the steps whose value is NaN or infinite, which a chart cannot draw."""
    if not len(steps):
        return ""
    told = ", ".join(str(step) for step in steps[:_MOST_STEPS])
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return f"NaN or infinite at step{'s' if len(steps) > 1 else ''} {told}{more}."


def published(low: float, high: float, sources: Sequence[str]) -> str:
    """Return the label for a published range, with its sources."""
    return f"published for these dtypes: {low:g} to {high:g} ({', '.join(dict.fromkeys(sources))})"


def replayed(one: ReplayEffect) -> str:
    return f"{effect_text(one)} ({one.num_tokens:,} tokens)"


def idle(names: Sequence[str], num: int) -> str:
    """Return a sentence that names the corrections that would have no effect."""
    return f"{len(names)} of {num} would have no effect: {', '.join(names)}." if names else ""


def steps_read(num_read: int, num_steps: int) -> str:
    """Return a text that states how many steps of a run a result covers."""
    if num_read < num_steps:
        return f"{num_read} of {num_steps} evenly spaced steps"
    return f"all {num_steps:,} steps" if num_steps > 1 else "its only step"


def sequence(one: TokenSample) -> str:
    """Describe a sequence in one line."""
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
        "A mismatch that grows with entropy comes from uncertain tokens, as expected from rounding.",
    ),
}  # fmt: skip
"""Breakdown -> (title, axis label, note) for the breakdown's chart."""
RATIO_SPLIT = (
    "Variance over tokens of the two parts of ln ratio: the mismatch d = train - rollout, and the policy's drift "
    "= current - train. Drift is intended and clipped; mismatch is neither."
)
BIAS = (
    "b is a token's contribution to the objective under the ratio the loss uses, minus its contribution under the true ratio. Both "
    "sums are divided by the sum of |f|, the size of the objective's terms. Above 0 the loss overstates the objective. "
    "If the sum is small compared with the sum of |b|, the errors cancel (arXiv 2605.14220)."
)


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
        f"The replay replaces {a}: 1 means that it agrees with {b}, 0 that it changes nothing, and a negative value "
        f"that the mismatch grows. "
        "Lines are 95% CIs over groups of sequences."
    )


def corrections_note(part: str) -> str:
    return (
        f"Cut: weight 0. Lowered: weight clamped to its bound. Computed on {part}. How much a correction helps: see "
        f"docs/evidence/remedies.md."
    )
