"""Values that do not belong to the sampled tokens: those of other or the most probable tokens, or entropies."""

from __future__ import annotations

import numpy as np

from ...statistics.moments import pearson
from .. import commands
from ..finding import Broken, Fault, Finding
from ..kinds import judged, judged_words
from ..likelihood import Hypothesis, of_signs, predicting
from ..pair_data import PairData
from ..rounding import allowed_noise
from ..structure import sampled_mean, sampled_score

_SAMPLED = {
    "unknown": ": they belong to different tokens, in no known order, or to different models",
    "from_other": ", and logprob + entropy of {other} averages to {mean:.2g}: the tokens were sampled from {other}'s "
    "distribution, so {side} holds other values",
    "from_neither": ", and logprob + entropy of {other} averages to {mean:.2g} nats: the tokens were not sampled from its "
    "distribution, so one side has broken weights or scored different text",
}

UNRELATED = Fault(
    code="unrelated",
    title="one side's values do not belong to the sampled tokens",
    broken="recording",
    evidence={
        "negative_entropies": "{side} holds the negative entropies of the distributions, not the logprobs of the "
        "{num_tokens:,} sampled tokens",
        "most_probable": "{side} is never below {other} and equal where the sampled token is the most probable one: it holds "
        "the logprobs of the most probable tokens, not of the {num_tokens:,} sampled ones",
        "no_correlation": "the logprobs of {side} and {other} are uncorrelated (correlation {correlation:.2f} over "
        "{num_tokens:,} tokens, or over tokens of the same id){sampled_text}",
        "scattered": "{num_tokens:,} values are off by {size:.2g} nats on average, and at these tokens {side} and "
        "{other} are uncorrelated (correlation {correlation:.2f}): they belong to other tokens, in {num_sequences:,} "
        "of {of_sequences:,} sequences",
        "judged": judged("values stored, gathered or changed wrongly"),
    },
    words={
        "judged": judged_words,
        "no_correlation": lambda n: {
            "sampled_text": _SAMPLED[n["sampled"]].format_map({**n, "mean": n["sampled_mean"] or 0.0})
        },
    },
    causes={
        "values": "recorded values are not the logprobs of the sampled tokens: stored, gathered or changed wrongly"
    },
)
MIN_CORRELATION = 0.3
"""Correlation between the logprobs of two passes below which they belong to different tokens or models. With rounding,
different weights or a different temperature it stays above 0.8; for unrelated values it is 0."""


def find_other_quantity(data: PairData) -> list[Hypothesis]:
    """Detect a pass that holds negative entropies, or the logprobs of the most probable tokens, instead of those of the
    sampled tokens."""
    found = []
    for side, values in (("a", data.a), ("b", data.b)):
        recorded = getattr(data.sample, side).entropy
        entropy = data.entropy if recorded is None else recorded[data.keep]
        if entropy is not None and np.std(entropy) > 0.05 and data.rms() > 0.05:
            left = values + entropy
            if np.quantile(np.abs(left), 0.95) < 0.1 * float(np.median(np.abs(data.d))):
                finding = UNRELATED.finding(
                    data, "negative_entropies", next=commands.tokens(data), numbers=_numbers(data, side)
                )
                found.append(predicting(data, finding, left, 1.0))
    for side, values, others, sign in (("b", data.b, data.a, -1.0), ("a", data.a, data.b, 1.0)):
        if _are_of_most_probable(values, others):
            finding = UNRELATED.finding(data, "most_probable", next=commands.tokens(data), numbers=_numbers(data, side))
            found.append(of_signs(data, finding, np.full(data.num_kept, sign), 1.0))
    return found


def _numbers(data: PairData, side: str) -> dict[str, str | int]:
    other = "b" if side == "a" else "a"
    return {"side": data.names[side], "other": data.names[other], "num_tokens": data.num_kept}


def _are_of_most_probable(values: np.ndarray, others: np.ndarray) -> bool:
    """Return True if `values` are consistent with the logprobs of the most probable tokens, and `others` with those of
    the sampled ones.

    `values` are then never below `others`, and equal where the sampled token is the most probable one. Elsewhere the
    two probabilities belong to different tokens, so their sum is at most 1. Renormalised logprobs, by contrast, are
    slightly higher at all tokens.
    """
    if len(values) < 30:
        return False
    raised = values - others
    equal = raised < max(0.05, 2 * -float(np.min(raised)))
    if not 0.1 < equal.mean() < 0.95 or np.min(raised) < -0.5 or raised.max() < 3.0:
        return False
    fits = np.exp(values[~equal]) + np.exp(others[~equal]) <= 1.05
    # The share of tokens at which the most probable token was sampled must match its mean probability.
    expected = float(np.mean(np.exp(np.minimum(values, 0.0))))
    return bool(fits.mean() > 0.995 and abs(equal.mean() - expected) < 0.1)


def find_unrelated(data: PairData) -> list[Hypothesis]:
    """Detect that the values in the two passes are uncorrelated."""
    if data.num_kept < 30 or data.rms() < 0.05 or min(np.std(data.a), np.std(data.b)) < 1e-3:
        return []
    correlation = max(pearson(data.a, data.b), pearson(_ranks(data.a), _ranks(data.b)))
    if correlation >= MIN_CORRELATION:
        # Values of the right token from a different context share the token's mean, but nothing else.
        correlation = max(correlation if (within := _within_ids(data)) is None else within, 0.0)
    return [_whole(data, correlation)] if correlation < MIN_CORRELATION else []


def _within_ids(data: PairData) -> float | None:
    """Return the correlation between the passes within token ids; None if too few ids repeat, or if the values of an id
    vary no more than rounding.
    """
    _, place, counts = np.unique(data.sample.tokens[data.keep], return_inverse=True, return_counts=True)
    often = counts[place] >= 4
    if often.sum() < 200:
        return None
    own = [(values - (np.bincount(place, values) / counts)[place])[often] for values in (data.a, data.b)]
    least = 5 * allowed_noise(data) * float(np.sqrt(np.mean(data.rest[often] ** 2)))
    return pearson(*own) if min(np.std(each) for each in own) > least else None


def find_scattered(data: PairData, off: np.ndarray) -> list[Finding]:
    """Detect that the tokens `off`, [K] bool, hold values of other tokens: uncorrelated with the other pass, above it as often
    as below, and spread like all values."""
    if off.sum() < 20 or min(np.std(data.a[off]), np.std(data.b[off])) < 0.1:
        return []
    within = pearson(data.a[off], data.b[off])
    one_sign = abs(float(np.mean(np.sign(data.d[off]))))
    alike = 0.5 < np.std(data.b[off]) / max(float(np.std(data.b)), 1e-9) < 2
    if within > MIN_CORRELATION or one_sign > 0.5 or not alike:
        return []
    return [
        UNRELATED.finding(
            data, "scattered", off, weight=float(np.sum(data.d[off] ** 2) / np.sum(data.d**2)),
            next=commands.far_tokens(data),
            numbers={
                "side": data.names["a"], "other": data.names["b"], "num_tokens": int(off.sum()), "correlation": within,
                "size": float(np.mean(np.abs(data.d[off]))), "num_sequences": len(np.unique(data.seq[off])),
                "of_sequences": len(np.unique(data.seq)),
            },
        )
    ]  # fmt: skip


def _whole(data: PairData, correlation: float) -> Hypothesis:
    side, sampled, broken, mean = "b", "unknown", None, None
    known = {name: sampled_score(data, name) for name in "ab" if getattr(data.sample, name).entropy is not None}
    if known:
        name = min(known, key=lambda each: abs(known[each]))
        side, mean = ("b" if name == "a" else "a"), sampled_mean(data, name)
        from_other = abs(known[name]) < 6 or abs(mean) < 0.1
        sampled = "from_other" if from_other else "from_neither"
        broken = None if from_other else "computation"
    whose: Broken | None = "computation" if broken else None
    finding = UNRELATED.finding(
        data, "no_correlation", next=commands.tokens(data), broken=whose,
        numbers={**_numbers(data, side), "correlation": correlation, "sampled": sampled, "sampled_mean": mean},
    )  # fmt: skip
    # As with scattered values, only the two separate distributions are predicted.
    gain = 0.05 * data.num_kept
    return Hypothesis(finding=finding, tokens=data.keep.copy(), gain=gain)


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
