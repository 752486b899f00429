"""Logits changed by one side before normalisation: a temperature, a token filter, a penalty or a bias.

In one context, changing a token's logit by c changes its logprob by c minus a constant shared by all tokens: c is
proportional to the logit (temperature), 0 for sampled tokens (filters), or fixed for some tokens (penalties, biases).

Shapes: K kept tokens in S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ....schemas.passes import TRAIN
from ...advice import Advice
from ...trace.ragged import centred
from .. import commands
from ..features import CLEAR, FEW, Side, clipped, counts, judged, judged_words, means, pearson, sides
from ..finding import SIDES, Fault, Finding, Hypothesis, Number, certain, of_signs, predicting
from ..pair_data import (
    MIN_REST,
    UNIT_ROUNDOFF,
    PairData,
    allowed_noise,
    context_pairs,
    log_odds,
    logit_error,
    once,
    value_rounding,
)
from ..sample import MOST_LOST, ratio_in_bits, unscaled_ratio
from ..where import occurrences, part_of_rows, where_text

MAX_LEFT = 0.3
"""Maximum share of the mismatch left unexplained by an explanation that predicts each value."""
MAX_SMOOTHING = 0.3
"""Largest usual label smoothing. More flattening has another cause."""
MIN_R2 = 0.6
"""Minimum share of the mismatch that one factor on the logits must explain."""


def _recorded_temperatures(numbers: Mapping[str, Any]) -> dict[str, str]:
    names = {"a": f"{numbers['a']}'s contract", "b": f"{numbers['b']}'s contract", "sampling": "sampling"}
    parts = [f"{name} {numbers[f'recorded_{key}']:g}" for key, name in names.items() if f"recorded_{key}" in numbers]
    if "logprobs_mode" in numbers:
        parts.append(f"logprobs_mode {numbers['logprobs_mode']}")
    return {"recorded_text": f"; recorded: {', '.join(parts)}" if parts else ""}


def _moved_ids(numbers: Mapping[str, Any]) -> dict[str, str]:
    ids = f"{numbers['num_ids']:,} token ids" if numbers["num_ids"] > 1 else f"token id {numbers['ids']}"
    is_lower = numbers["mean_ids"] < 0
    return {"ids_text": ids, "lowers": "lowers" if is_lower else "raises", "raises": "raises" if is_lower else "lowers"}


TEMPERATURE = Fault(code="temperature", title="temperature on one side only", broken="recording", evidence={
    "scaled_logits": "{b}'s logits equal {a}'s divided by {temperature:.3g} (fitted; {least:.3g} to {largest:.3g}), which accounts for {r2:.0%} of the mismatch{recorded_text}",
    "in_contexts": "at {num_pairs:,} pairs of different tokens after the same prefix, where normalisers cancel, {b}'s logits equal {a}'s divided by {temperature:.3g} (fitted; {least:.3g} to {largest:.3g}), which accounts for {r2:.0%} of the mismatch there. The normalisers differ by more than this, as with a filter{recorded_text}{filter}",
    "divided": "{side}'s logprobs were computed at temperature 1 and divided by {temperature:g}, but not normalised again: they differ from {other}'s nearly always in the same direction, by {slope:.2g} times (1/T - 1) times the entropy (correlation {correlation:.2f}), where T is the recorded temperature",
    "by_setting": "the ratio of the two sides' logits follows the temperatures recorded for the rows ({num_values} different values, {least:g} to {largest:g}), so {side} applies each row's temperature, but {other} uses one temperature for all rows",
}, words=dict.fromkeys(("scaled_logits", "in_contexts"), _recorded_temperatures), clauses={"filter": "; {filter}"}, causes={"divided": "one side's logprobs are divided by the temperature, but not normalised again", "scale": "one side's logits are scaled, e.g. by a temperature, a soft cap, or a factor in the head or its norm"})  # fmt: skip
TRUNCATION = Fault(code="truncation", title="one side's softmax covers fewer tokens: top-p, top-k or min-p, a grammar, or forbidden tokens", broken="recording", causes={
    "filter": "one side's logprobs were renormalised after top-p, top-k or min-p",
    "forbidden": "one side forbids token ids that the other side sampled",
    "masked": "one side cuts off tokens that the other side sampled, as if it applied top-p, top-k or min-p to its own logits",
}, evidence={
    "forbidden": "{side} has about {value:.4g} nats at all {num_tokens:,} tokens with certain ids (number of ids: {num_ids:,}), where {other} has {other_mean:.3g} nats on average, so {side} forbids these ids, but sampling allowed them",
    "masked": "{side} has about {value:.4g} nats at {num_tokens:,} tokens scattered over {num_sequences:,} sequences, where {other} has {other_mean:.3g} nats on average ({elsewhere_mean:.3g} elsewhere), so {side} masks improbable tokens that sampling kept",
    "kept_mass": "{side}'s logprobs are never below {other}'s, so they were renormalised over the tokens that sampling kept, which have {kept_mass:.4g} of {other}'s probability mass on average, and at least {least_mass:.3g}{recorded}",
}, clauses={"recorded": "; recorded: {recorded}"})  # fmt: skip
SMOOTHED = Fault(code="smoothed", title="one side's logprobs are mixed with their mean over the vocabulary, as in label smoothing", broken="recording", evidence={
    "smoothed": "{side}'s logprobs are below {other}'s at all tokens, by the largest amount at likely ones: the difference is {mean:.3g} nats at tokens with a probability of 1, and shrinks by {smoothing:.3g} nats for each nat by which the logprob is lower, {cause}"
}, clauses={"cause": {"": "as with label smoothing of {smoothing:.3g}", "flattened": "as if its logits were capped or scaled by a wrong formula"}}, causes={"flattened": "one side's distribution is far flatter: its logits are capped or scaled wrongly"})  # fmt: skip
PADDED_VOCABULARY = Fault(code="padded_vocabulary", title="one side's softmax covers more tokens: vocabulary padding, forbidden tokens, or a shard that the other side lacks", broken="computation", evidence={
    "lost_mass": "{side}'s logprobs are never above {other}'s, because {side} gives {lost_mass:.3g} of its probability to ids that {other} leaves out, such as head rows beyond the tokenizer's length, tokens that {other} forbids, or a vocabulary shard missing in {other}{copies}"
}, clauses={
    "copies": ". All tokens lose the same factor, {copies}, as if the softmax summed over the vocabulary {copies} times, for example over tensor-parallel ranks that each have all logits"
})  # fmt: skip
GRAMMAR = Fault(code="grammar", title="one side was sampled under a grammar, so its softmax covers only the allowed tokens", broken="recording", evidence={
    "allowed_tokens": "{side} was sampled under a grammar (structured outputs), so its softmax covers only the allowed tokens, but {other}'s covers all tokens; of the {of_tokens:,} tokens sampled under a grammar, {num_tokens:,} have a logprob that is higher in {side} by more than rounding (at most {largest:.3g} nats), and {num_lower:,} have a lower one"
})  # fmt: skip
PENALTY = Fault(code="penalty", title="a repetition, presence or frequency penalty, a logit bias or a token filter on one side only", broken="recording", evidence={
    "repeated": "{side} lowers a token's logit by {slope:.3g} {by_count} in the {counted}, as with a repetition, presence or frequency penalty; this explains {r2:.0%} of the difference in log-odds (logprobs change by {mean_repeated:+.2g} nats on average at repeated tokens and by {mean_new:+.2g} at new ones){recorded}",
    "lowers_repeated": "{side} lowers the logprobs of tokens that occurred earlier in the {counted} ({mean_repeated:+.2g} nats on average) and raises those of all others ({mean_new:+.2g}): this holds for {right:.1%} of the {num_tokens:,} tokens whose mismatch exceeds rounding, as with a repetition, presence or frequency penalty{recorded}",
    "token_ids": "{side} {lowers} the logprobs of {ids_text} ({mean_ids:+.2g} nats on average) and {raises} all others ({mean_rest:+.2g}), as with a logit bias or a token filter",
    "one_shift": "for pairs of different tokens after the same prefix, both sides should have the same logprob difference. Of {num_pairs:,} such pairs, {num_equal:,} agree and {num_shifted:,} disagree by {bias:.3g} nats, so one side shifts the logits of some tokens, as with a logit bias or a penalty",
    "judged": judged("a filter, penalty, bias or temperature that one side does not apply"),
    "sampled_by_rows": "the passes agree, but in {num_sequences:,} of {of_sequences:,} sequences, {where}, logprob + entropy averages {mean:.3g} nats ({mean_rest:.2g} in the rest), so these sequences were sampled at a different temperature or with a filter",
    "sampled_elsewhere": "the passes agree, but logprob + entropy averages {mean:.3g} nats instead of 0, so sampling applied a temperature, filter or penalty that neither pass applies, or neither pass is in nats{recorded}",
}, words={
    "token_ids": _moved_ids, "judged": judged_words,
    "sampled_by_rows": lambda n: {"where": where_text(n).removeprefix("all ")},
}, clauses={
    "recorded": "; recorded: repetition_penalty {recorded:g}",
    "by_count": {1: "for each time it occurred earlier", 0: "if it occurred earlier"},
}, causes={
    "repeated": "a repetition, presence or frequency penalty on one side only",
    "token_ids": "a logit bias or token filter on one side only",
    "sampled_elsewhere": "the tokens were sampled from a distribution that neither side recorded",
})  # fmt: skip

# --- A factor on the logits

MAX_TEMPERATURE = 20.0


class ScaleFit(NamedTuple):
    scale: float
    """Pass b's logits divided by pass a's, i.e. temperature a / temperature b."""
    lowest: float
    highest: float
    """Bounds on the scale: fits with either side as the reference, widened by two standard errors."""
    r2: float
    """Share of the variance in d explained by the scale."""
    score: float
    """Distance between the scale and 1, in standard errors."""
    residual: np.ndarray
    """[K] unexplained part of d (nats). NaN where the scale predicts nothing."""


def find_temperature(data: PairData) -> list[Hypothesis]:
    """Explain d by a factor on one side's logits: the same for all tokens, or each row's recorded temperature."""
    off = np.abs(data.d) > 4 * value_rounding(data)
    lower = float(np.mean(data.d[off] < 0)) if off.any() else 0.5
    if not 0.02 < lower < 0.98:
        return _in_contexts(data)  # a factor alone raises likely tokens and lowers unlikely ones, or vice versa
    if found := _by_setting(data):
        return found
    if (fit := _scale(data)) is None:
        return _in_contexts(data)
    exact = _exact_scale(data)
    return [_scaled(data, fit, exact)] if exact is None or exact.log * np.log(fit.scale) > 0 else []


def _by_setting(data: PairData) -> list[Hypothesis]:
    settings = data.sample.settings["temperature"][data.seq]
    residual, logs = data.d.copy(), []
    known, num = np.unique(settings[np.isfinite(settings) & (settings > 0)], return_counts=True)
    for value in known[num >= FEW] if len(known) > 1 else ():
        part = data.within(settings == value)
        if (fit := _scale(part)) is not None:
            residual[settings == value] = np.where(np.isfinite(fit.residual), fit.residual, part.d)
        logs.append((np.log(value), 0.0 if fit is None else np.log(fit.scale)))
    recorded, fitted = np.array(logs).reshape(-1, 2).T
    for side in sides(data) if len(logs) > 1 and np.ptp(recorded) > 0.1 else ():
        off = fitted - side.sign * recorded
        if np.max(np.abs(off - np.median(off))) < np.ptp(recorded) / 4:
            least, largest = float(np.exp(recorded.min())), float(np.exp(recorded.max()))
            numbers = side.names | {"num_values": len(logs), "least": least, "largest": largest}
            next = commands.by_column(data, "temperature")
            finding = TEMPERATURE.finding(data, "by_setting", next=next, numbers=numbers)
            return [predicting(data, finding, residual, 8.0)]
    return []


def _scale(data: PairData) -> ScaleFit | None:
    """Estimate the factor between the logits from log-odds, which is exact only if just two tokens are possible."""
    odds = [log_odds(values) for values in (data.a, data.b)]
    off = odds[1] - odds[0]
    there = (data.rest > 1e-5) & (np.minimum(data.a, data.b) > -15)
    if there.sum() < FEW:
        return None
    away = np.abs(off - np.median(off[there]))
    keep = there & (away <= np.quantile(away[there], 0.98) + 1e-12)
    centred = [values - values[keep].mean() for values in (off, *odds)]
    own = centred[1][keep]
    slopes = [float(each[keep] @ centred[0][keep] / max(each[keep] @ each[keep], 1e-30)) for each in centred[1:]]
    error = float(np.sqrt(np.mean((centred[0][keep] - slopes[0] * own) ** 2) / max(own @ own, 1e-30)))
    # Noise in the reference flattens the slope, so the true scale lies between the slopes with each side as reference.
    ends = sorted([1 + slopes[0], *([1 / (1 - slopes[1])] if slopes[1] < 1 else [])])
    low, high = ends[0], ends[-1]
    scale = low if low > 1 else min(high, 1.0)
    if low <= 2 * error or not 1 / MAX_TEMPERATURE < scale < MAX_TEMPERATURE:
        return None
    left = centred[0] - (scale - 1) * centred[1]
    r2 = 1 - float(left[keep] @ left[keep]) / max(float(centred[0][keep] @ centred[0][keep]), 1e-30)
    fit = ScaleFit(
        scale, low - 2 * error, high + 2 * error, r2, abs(slopes[0]) / max(error, 1e-12), np.where(there, left * data.rest, np.nan)
    )  # fmt: skip
    is_clear = fit.score >= CLEAR and r2 >= MIN_R2
    # Rounding to bfloat16 alone can scale logits, but only by a factor closer to 1 than is required here.
    return fit if is_clear and abs(np.log(scale)) >= 2 * UNIT_ROUNDOFF["bfloat16"] else None


class ExactScale(NamedTuple):
    scale: float
    """Pass b's logits divided by pass a's."""
    error: float
    log: float
    """Logarithm of the scale. NaN if the logits are not proportional."""
    num_pairs: int
    r2: float
    """Share of the pairs' mismatch explained by the scale."""


@once
def _exact_scale(data: PairData) -> ExactScale | None:
    """Fit a scale to the logits of pairs of tokens in the same context, whose normaliser cancels out. Return None if there are
    too few."""
    first, second = context_pairs(data)
    one, two = data.a[first] - data.a[second], data.b[first] - data.b[second]
    known = (np.maximum(np.abs(one), np.abs(two)) > 0.3) & (np.abs(one) < 15)
    if known.sum() < 12:
        return None
    one, two = one[known], two[known]
    ratio = two / np.where(np.abs(one) > 1e-6, one, 1e-6)
    scale = float(np.median(ratio))
    left = two - scale * one
    error = 2 * 1.25 * float(np.median(np.abs(ratio - scale))) / 0.67 / np.sqrt(len(ratio)) + 1e-5 * abs(scale)
    r2 = 1 - float(left @ left) / max(float((two - one) @ (two - one)), 1e-30)
    is_scale = r2 > 0.9 or np.sqrt(np.mean(left**2)) < allowed_noise(data)
    return ExactScale(scale, error, float(np.log(scale)) if scale > 0 and is_scale else float("nan"), len(ratio), r2)


def _in_contexts(data: PairData) -> list[Hypothesis]:
    """Explain d by a temperature that only pairs of tokens in the same context show, because a filter changes the normaliser."""
    exact = _exact_scale(data)
    if exact is None or np.isnan(exact.log) or exact.r2 < 0.9 or abs(exact.log) < 2 * CLEAR * exact.error / exact.scale:
        return []
    temperature, known = 1 / exact.scale, _temperatures(data)
    numbers: dict[str, Number] = {**data.names, **known, "temperature": temperature, "filter": recorded_filter(data)}
    numbers |= {"least": 1 / (exact.scale + exact.error), "largest": 1 / (exact.scale - exact.error)}
    numbers |= {"num_pairs": exact.num_pairs, "r2": exact.r2}
    next = _confirming(data, temperature, has_contexts=True)
    finding = TEMPERATURE.finding(data, "in_contexts", weight=exact.r2, next=next, numbers=numbers)
    return [certain(finding, -exact.num_pairs / 2 * np.log(max(1 - exact.r2, 1e-12)) - 16.0)]


def _scaled(data: PairData, fit: ScaleFit, exact: ExactScale | None) -> Hypothesis:
    middle, low, high = fit.scale, fit.lowest, fit.highest
    # Across contexts, the fit is exact only to first order in the log of the temperature, so widen its bounds.
    error = max((1 - fit.r2) / 2, 0.05, abs(np.log(middle)) / 2)
    if exact is not None:
        middle, low, high, error = exact.scale, exact.scale - exact.error, exact.scale + exact.error, 0.0
    wider = float(np.exp(abs(np.log(middle)) * error))
    temperature, known = 1 / middle, _temperatures(data)
    recorded = known.get("recorded_sampling", temperature)
    nearest = recorded if abs(np.log(recorded / temperature)) < 0.3 else temperature
    numbers: dict[str, Number] = {"temperature": temperature, "least": 1 / (high * wider)}
    numbers |= {"largest": wider / max(low, 1 / MAX_TEMPERATURE), "r2": fit.r2, "standard_errors": fit.score}
    # If every recorded temperature is 1, the cause is reported as a scale, which need not be a temperature.
    numbers |= {**data.names, **known, "cause": "scale" if {*known.values()} == {1.0} else ""}
    if mode := data.contract("b").get("logprobs_mode"):
        numbers["logprobs_mode"] = str(mode)
    next = _confirming(data, nearest, has_contexts=exact is not None)
    finding = TEMPERATURE.finding(data, "scaled_logits", weight=fit.r2, next=next, numbers=numbers)
    hypothesis = predicting(data, finding, fit.residual, 8.0)
    # An explanation that agrees with a recorded temperature takes precedence.
    is_recorded = low / wider < 1 / nearest < high * wider and abs(np.log(nearest)) > 0.02 and nearest != temperature
    return replace(hypothesis, gain=float("inf")) if is_recorded else hypothesis


def _temperatures(data: PairData) -> dict[str, float]:
    settings, sampling = data.sample.settings["temperature"], data.contract("b").get("sampling")
    named = {
        "recorded_a": data.contract("a").get("temperature"),
        "recorded_b": sampling.get("temperature") if isinstance(sampling, dict) else None,
        "recorded_sampling": float(np.nanmedian(settings)) if np.isfinite(settings).any() else None,
    }
    return {name: value for name, value in named.items() if isinstance(value, (int, float))}


def _confirming(data: PairData, temperature: float, *, has_contexts: bool) -> Advice:
    if data.has_weights:
        return commands.replay(data, f"--temperature {temperature:.3g}", "temperature")
    if has_contexts:
        return commands.query(data, "context-odds")
    odds_a, odds_b = (f"ln(exp({name}) / (1 - exp({name})))" for name in ("logprob_a", "logprob_b"))
    query = f"SELECT step, regr_slope({odds_a}, {odds_b}) AS temperature_b FROM {{pair}} "
    query += "WHERE mask AND logprob_a < -0.001 AND logprob_b < -0.001 GROUP BY step ORDER BY step"
    return commands.sql(data, query)


# --- Tokens left out

IMPOSSIBLE_LOGPROB = -80.0
"""Minimum logprob of a sampled token (nats; a probability of 1e-35). Lower values are placeholders such as -100."""


def find_one_sided(data: PairData) -> list[Hypothesis]:
    """Explain d if its larger values nearly all have the same sign. The mean of exp(-|d|) over sampled tokens is then
    the probability mass that both passes share."""
    size = np.abs(data.d)
    squares = size * size
    if len(size) < 20 or not size.any():
        return []
    raised, lowered = sides(data)
    if squares[data.d < 0].sum() > 0.5 * squares.sum():
        raised, lowered = lowered, raised
    opposite = data.d * raised.sign < 0
    # Rounding errors have either sign, but nearly all larger differences must have the same sign.
    large = size > 2 * (float(np.quantile(size[opposite], 0.95)) if opposite.any() else 0.0)
    clear = large.any() and opposite[large].mean() <= 0.05 and squares[large].sum() >= 0.5 * squares.sum()
    # Rule out scaled logits, which move improbable tokens a lot in one direction and all others a little in the other.
    if abs(float(data.d.mean())) / float(size.mean()) < (0.6 if clear else 0.7):
        return []
    quarters = np.array_split(np.argsort(-np.maximum(data.a, data.b), kind="stable"), 4)
    medians = [float(np.median(size[each])) for each in quarters]
    if all(np.diff(medians) < 0) and medians[0] > 1.2 * medians[3] and pearson(data.a, data.b) > 0.8:
        return [_smoothed(data, lowered)]
    # Unlike lost mass, a wrong computation also moves some tokens the opposite way by more than rounding error.
    most = max((0.1 if recorded_filter(data) else 0.02) * opposite.sum(), 0.002 * len(size))
    if np.sum(size[opposite] > 3 * (allowed_noise(data) * data.scale)[opposite]) > most:
        return []
    # Lost mass shifts all tokens of a context equally, so |d| is hardly larger at improbable tokens.
    if medians[3] > max(3.0, 20 * medians[1]):
        return []
    mass = np.minimum(np.exp(-data.d * raised.sign), 1.0)
    if (1 - mass.mean()) * np.sqrt(len(mass)) < (4 if clear else 8) * max(float(mass.std()), 1e-12):
        return []
    copies = round(float(np.exp(min(np.median(size), 10.0))))
    # Mass on other ids would differ between contexts. If |d| is the log of the same integer everywhere, the normaliser
    # counts the same ids several times.
    is_same = copies > 1 and np.mean(np.abs(size - np.log(copies)) < allowed_noise(data) * data.scale) > 0.99
    if divided := _divided(data, raised, lowered):
        return [divided]
    if _in_contexts(data):
        return []
    if _is_cut(data, raised) and not is_same:
        fault, signal, known = TRUNCATION, "kept_mass", recorded_filter(data)
        next = commands.replay(data, f"--top-p {max(mass.min(), 0.01):.2g}", "cut")
        numbers = raised.names | {"kept_mass": float(mass.mean()), "least_mass": float(mass.min())}
        numbers |= {"recorded": known, "cause": "filter" if known else ""}
    else:
        fault, signal, numbers = PADDED_VOCABULARY, "lost_mass", lowered.names | {"lost_mass": float(1 - mass.mean())}
        numbers |= {"copies": copies} if is_same else {}
        query = "SELECT step, avg(1 - exp(-abs(d))) AS lost_mass FROM {pair} WHERE mask AND d "
        query += f"{'>' if raised.key == 'a' else '<'} 0 GROUP BY step ORDER BY step"
        next = commands.sql(data, query)
    finding = fault.finding(data, signal, mass < 1 - 1e-6, next=next, numbers=numbers)
    found = of_signs(data, finding, np.full(data.num_kept, raised.sign), 4.0)
    least = float(np.min(np.nan_to_num(data.sample.settings["top_p"], nan=1.0), initial=1.0))
    is_within = least >= 1.0 or float(np.mean(size > -np.log(least) + 3 * allowed_noise(data))) < 0.01
    # An explanation that agrees with a recorded filter takes precedence.
    is_recorded = recorded_filter(data) and raised.own.name != TRAIN and is_within
    return [replace(found, gain=float("inf")) if is_recorded else found]


def _divided(data: PairData, raised: Side, lowered: Side) -> Hypothesis | None:
    """Explain d by a recorded temperature T that one side applied as ln(p) / T, while the other normalised p^(1/T).
    Then d is (1/T - 1) times the Renyi entropy of order T of the normalised distribution. This is at least the
    distribution's entropy if T < 1, and at most its entropy if T > 1."""
    usual = _temperatures(data).get("recorded_sampling", 1.0)
    if data.entropy is None or usual <= 0 or recorded_filter(data):
        return None
    recorded = data.sample.settings["temperature"][data.seq]
    size, expected = np.abs(data.d), np.abs(1 / np.where(recorded > 0, recorded, usual) - 1) * data.entropy
    slope, correlation = float(size.mean() / max(expected.mean(), 1e-9)), pearson(size, expected)
    side, lowest, highest = (lowered, 0.9, 2.5) if usual < 1 else (raised, 0.4, 1.1)
    if not (lowest < slope < highest and correlation > 0.9):
        return None
    numbers = side.names | {"cause": "divided", "temperature": usual, "slope": slope, "correlation": correlation}
    return certain(TEMPERATURE.finding(data, "divided", next=commands.tokens(data), numbers=numbers))


def _smoothed(data: PairData, side: Side) -> Hypothesis:
    """Explain d by label smoothing: logprob' = (1 - s) logprob + s mean, where mean is over the vocabulary."""
    slope, mean = np.polyfit(side.others, side.values - side.others, 1)
    is_flat = -slope > MAX_SMOOTHING
    numbers = side.names | {"smoothing": -float(slope), "mean": float(mean), "cause": "flattened" if is_flat else ""}
    broken = SIDES.get(data.names[side.key], "computation") if is_flat else None
    finding = SMOOTHED.finding(data, "smoothed", next=commands.tokens(data), broken=broken, numbers=numbers)
    return of_signs(data, finding, np.full(data.num_kept, -side.sign), 4.0)


def recorded_filter(data: PairData) -> str:
    settings = {name: data.sample.settings[name] for name in ("top_p", "top_k", "min_p")}
    cuts = {name: each[(each < 1) if name == "top_p" else (each > 0)] for name, each in settings.items()}
    return ", ".join(f"{name} {float(np.median(each)):g}" for name, each in cuts.items() if len(each))


def _is_cut(data: PairData, raised: Side) -> bool:
    """Return True if tokens were filtered out, or False if padding rows were added to the vocabulary. Signs of
    truncation: a single kept token with logprob 0, nearly the same total mass of kept tokens in every context, or a mean
    of 1 / p (an estimate of how many tokens can be sampled) far below the vocabulary size."""
    was_cut = (raised.own.logprobs <= IMPOSSIBLE_LOGPROB) & np.isfinite(raised.other.logprobs)
    if recorded_filter(data) or np.any(was_cut & data.sample.mask):
        return True
    neutral = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    if raised.key == "a" or all(np.all(data.sample.settings[name] == value) for name, value in neutral.items()):
        return False  # the recorded settings rule out truncation
    if np.mean((data.b > -1e-6) & (data.a < -1e-3)) > 0.01:
        return True
    missing = -np.expm1(np.minimum(data.d, 0.0))
    is_constant = np.subtract(*np.quantile(missing, [0.9, 0.1])) < 0.02 * np.median(missing)
    return bool(is_constant or np.mean(np.exp(-data.b)) < 0.6 * (data.sample.tokens.max() + 1))


def find_grammar(data: PairData) -> Iterator[Hypothesis]:
    """Explain d by a grammar that one contract declares. It raises every logprob, so lower logprobs rule it out."""
    named = sorted(name for name, each in data.contracts.items() if each.get("structured_outputs") is True)
    under = {side.key: np.isin(np.array(side.own.contracts, str), named) for side in sides(data)}
    for key, other in ("ab", "ba"):
        tokens = data.keep & (under[key] & ~under[other])[data.sample.seq]
        inside = data.without(~tokens)
        side = sides(inside)["ab".index(key)] if tokens.any() else None
        if side is None or np.std(side.values) < 1e-3:
            continue
        rise = side.values - side.others
        rounding = allowed_noise(inside) * np.maximum(-np.expm1(side.others), MIN_REST)
        raised, num_lower = rise > rounding, int(np.sum(-rise > rounding))
        if raised.sum() < 10 or num_lower > 0.05 * (raised.sum() + num_lower):
            continue
        step = int(inside.sample.steps[inside.seq[raised][0]])
        finding = GRAMMAR.finding(
            inside, "allowed_tokens", raised, next=commands.whole_vocabulary_replay(inside, side.other.name, step),
            numbers=side.names | counts(inside, raised) | {"num_lower": num_lower, "largest": float(rise.max())},
        )  # fmt: skip
        yield Hypothesis(finding=finding, tokens=tokens, gain=float("inf"))


# --- Shifted logits


def find_penalty(data: PairData) -> list[Hypothesis]:
    """Explain d by shifted logits at repeated tokens (a penalty), at some ids (a bias) or, failing that, anywhere."""
    if data.num_kept < 200:
        return []
    repeated = [each for each in _repeated(data) if each.gain > 0] or _lowers_repeated(data)
    return [*repeated, *_of_ids(data), *_biased(data)] or _one_shift(data)


def _repeated(data: PairData) -> list[Hypothesis]:
    """Explain d by log-odds that differ by a constant per earlier occurrence of the token, or after the first one, plus a
    multiple of the log-odds: a repetition penalty is a factor on the logit (Keskar et al. 2019, arXiv 1909.05858). The
    fit compares tokens with the same id, which rules out biases, and has log-odds as a regressor, which rules out scales."""
    known, odds_a, odds_b, ids, place = _informative_odds(data)
    if len(place) < 200:
        return []
    shift = clipped((odds_a - odds_b)[known])
    odds, y = centred((odds_a + odds_b)[known] / 2, place), centred(shift, place)
    alone = y - (y @ odds) / max(odds @ odds, 1e-30) * odds
    recorded, r2, moved, times, counted = recorded_penalty(data), 0.0, np.zeros(0), np.zeros(0), ""
    level = np.where(known, odds_a + odds_b, 0.0) / 2
    for name in ("response", "row"):
        count = occurrences(data)[name].astype(float)
        for tried in (count, np.minimum(count, 1)):
            columns = np.stack([centred(tried[known], place), centred((tried * level)[known], place), odds], axis=1)
            fitted, *_ = np.linalg.lstsq(columns, y, rcond=None)
            left = y - columns @ fitted
            share = 1 - (left @ left) / max(alone @ alone, 1e-30)
            if columns[:, 0].any() and share > r2:
                r2, moved, times, counted = share, tried * (fitted[0] + level * fitted[1]), tried, name
    if r2 < 0.1 or np.sqrt(r2 * (len(y) - len(ids))) < 10:
        return []
    slope = float(moved[known].sum() / times[known].sum())
    side = sides(data)[slope > 0]
    again, new = (side.sign * float(data.d[each].mean()) for each in (times > 0, times == 0))
    numbers = side.names | {"cause": "repeated", "counted": counted, "by_count": int(times.max() > 1)}
    numbers |= {"slope": abs(slope), "r2": float(r2), "mean_repeated": again, "mean_new": new, "recorded": recorded}
    finding = PENALTY.finding(data, "repeated", times > 0, next=commands.far_tokens(data), numbers=numbers)
    predicted = -np.logaddexp(0.0, -(odds_b + moved + np.median(shift - moved[known])))
    residual = np.where(known, data.a - predicted, data.d)
    return [predicting(data, finding, residual, 8.0 if recorded is None else 0.0, formula=times > 0)]


def _lowers_repeated(data: PairData) -> list[Hypothesis]:
    """Explain d by its sign: a penalty lowers the logprobs of repeated tokens, and raises all others by what these lose."""
    off, found = np.abs(data.d) > 2 * (allowed_noise(data) * np.maximum(data.rest, 1e-3) + value_rounding(data)), []
    for counted in ("response", "row"):
        repeated = occurrences(data)[counted] > 0
        for side in sides(data):
            sign = np.where(repeated, -side.sign, side.sign)
            right = [np.sign(data.d[off & part]) == sign[off & part] for part in (repeated, ~repeated)]
            if min(map(len, right)) >= FEW and right[0].mean() > 0.9 and right[1].mean() > 0.98:
                means = (side.sign * float(data.d[off & part].mean()) for part in (repeated, ~repeated))
                numbers = side.names | {"cause": "repeated", "counted": counted, "recorded": recorded_penalty(data)}
                numbers |= dict(zip(("mean_repeated", "mean_new"), means, strict=True))
                numbers |= {"right": float(np.concatenate(right).mean()), "num_tokens": int(off.sum())}
                next = commands.far_tokens(data)
                finding = PENALTY.finding(data, "lowers_repeated", off, next=next, numbers=numbers)
                found.append(of_signs(data, finding, np.where(off, sign, 0), 8.0))
    return sorted(found, key=lambda each: -each.gain)[:1]


@once
def _informative_odds(data: PairData) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    known = (data.rest > 0.05) & (np.minimum(data.a, data.b) > IMPOSSIBLE_LOGPROB)
    ids, place = np.unique(data.sample.tokens[data.keep][known], return_inverse=True)
    return known, log_odds(data.a), log_odds(data.b), ids, place


def _of_ids(data: PairData) -> list[Hypothesis]:
    """Explain d if it has one sign at some token ids and the opposite sign at all others."""
    off = np.abs(data.d) > allowed_noise(data) / 2 * np.maximum(data.rest, 1e-3) + 2 * value_rounding(data)
    ids, place = np.unique(data.sample.tokens[data.keep], return_inverse=True)
    if data.num_kept < 400 or off.sum() < 50:
        return []
    num = np.bincount(place[off], minlength=len(ids))
    lean = np.bincount(place[off], np.sign(data.d[off]), len(ids)) / np.maximum(num, 1)
    usual = 1.0 if np.sum(np.sign(data.d[off])) > 0 else -1.0
    other = (num >= 4) & (lean * usual < -0.9)
    chosen = other[place]
    # A bias changes the normaliser, so the logprobs of all other tokens must differ, too.
    if not (1 <= other.sum() <= max(4, len(ids) // 3) and np.mean(off[~chosen]) >= 0.2) or (off & chosen).sum() < 4:
        return []
    sign = np.where(chosen, -usual, usual)
    if np.mean(np.sign(data.d[off]) == sign[off]) < 0.97:
        return []
    finding = _of_some_ids(data, ids[other], chosen, off)
    return [of_signs(data, finding, sign, float(other.sum()) * np.log(len(ids)) + 8.0)]


def _of_some_ids(data: PairData, ids: np.ndarray, chosen: np.ndarray, off: np.ndarray) -> Finding:
    side = sides(data)[1]
    numbers = side.names | {"cause": "token_ids", "num_ids": len(ids), "ids": ", ".join(map(str, ids[:8]))}
    numbers["mean_ids"] = side.sign * float(data.d[chosen & off].mean())
    numbers["mean_rest"] = side.sign * float(data.d[~chosen].mean())
    return PENALTY.finding(data, "token_ids", off, next=commands.far_tokens(data), numbers=numbers)


def _biased(data: PairData) -> list[Hypothesis]:
    """Explain d by a bias at a few token ids. Their log-odds then differ by the same amount in every context."""
    known, odds_a, odds_b, ids, place = _informative_odds(data)
    if len(place) < 200:
        return []
    shift, num = (odds_a - odds_b)[known], np.bincount(place, minlength=len(ids))
    usual = float(np.median(np.abs(shift)))
    middle = shift[np.lexsort((shift, place))][np.cumsum(num) - num + num // 2]
    around = np.bincount(place, np.minimum(np.abs(shift - middle[place]), 2.0)) / num
    biased = (num >= 3) & (np.abs(middle) > max(0.2, 6 * usual)) & (around < np.abs(middle) / 4)
    chosen = np.zeros(data.num_kept, bool)
    chosen[known] = biased[place]
    if not 1 <= biased.sum() <= max(4, len(ids) // 3) or chosen.sum() < 6:
        return []
    after = np.r_[False, chosen[:-1] & (np.diff(data.seq) == 0)] & known & ~chosen
    if after.any() and np.median(np.abs(odds_a - odds_b)[after]) > 4 * usual:
        return []  # tokens after these ids differ, too, so the two sides read different ids
    moved = np.zeros(data.num_kept)
    moved[known] = middle[place]
    predicted = -np.logaddexp(0.0, -(odds_b + moved))
    finding = _of_some_ids(data, ids[biased], chosen, chosen)
    residual = np.where(chosen, data.a - predicted, data.d)
    found = predicting(data, finding, residual, float(biased.sum()) * np.log(len(ids)), chosen)
    return [found] if found.left is not None and found.left < MAX_LEFT else []


def _one_shift(data: PairData) -> list[Hypothesis]:
    """Explain d by one fixed shift, if d differs between tokens in the same context by either 0 or this shift."""
    first, second = context_pairs(data)
    differ = np.abs(data.d[first] - data.d[second])
    error = allowed_noise(data) * np.maximum(data.scale[first], data.scale[second])
    shifted = differ > np.maximum(3 * error, 0.05)
    bias = float(np.median(differ[shifted])) if shifted.any() else 0.0
    near = np.abs(differ[shifted] - bias) < np.minimum(3 * error[shifted], bias / 10)
    if len(differ) < 12 or shifted.sum() < 8 or not 0.05 < shifted.mean() < 0.95 or near.mean() < 0.9:
        return []
    numbers: dict[str, Number] = {"num_pairs": len(differ), "num_equal": int((~shifted).sum())}
    numbers |= {"num_shifted": int(near.sum()), "bias": bias}
    finding = PENALTY.finding(data, "one_shift", next=commands.far_tokens(data), numbers=numbers)
    # Without a fixed shift, the differences would be spread evenly between 0 and twice the bias.
    return [certain(finding, float(near.sum()) * np.log(bias / np.median(error[shifted])) - 16.0)]


def find_sampled_elsewhere(data: PairData) -> list[Hypothesis]:
    """Detect tokens sampled from a distribution that neither pass recorded, in the whole run or in some rows. The passes
    agree, so the comparison is valid, unless both recorded values in another unit, which looks the same."""
    data = data.within(data.updates_behind[data.seq] == 0)  # older weights sampled the other rows
    if (judged_side := _judged(data)) is None:
        return []
    (side, entropy), recorded = judged_side, recorded_penalty(data)
    is_sharper = side.sampled_mean > 0
    excess = means(np.nan_to_num(side.values + entropy), data.seq, data.sample.num_sequences)
    part = part_of_rows(data.sample, excess) if _is_plain(data) else None
    numbers: dict[str, Number] = {"mean": side.sampled_mean, "recorded": recorded, "cause": "sampled_elsewhere"}
    if part is not None:
        where, rows = part
        inside, values = rows[data.seq], side.values + entropy
        numbers |= counts(data, inside) | where
        numbers |= {"mean": float(np.nanmean(values[inside])), "mean_rest": float(np.nanmean(values[~inside]))}
    else:
        # Overly likely tokens are reported only if the recording rules out a filter and a temperature. Overly unlikely
        # tokens need more evidence, because slightly different weights can cause them, too.
        needed = CLEAR * (1 if recorded or is_sharper else 2)
        is_clear = abs(side.sampled_score) >= needed and abs(side.sampled_mean) >= 0.05
        if not is_clear or (is_sharper and not _is_plain(data)) or ratio_in_bits(-side.values, entropy):
            return []
    signal = "sampled_elsewhere" if part is None else "sampled_by_rows"
    finding = PENALTY.finding(data, signal, next=commands.tokens(data), effect=0.0, numbers=numbers)
    if part is not None or recorded or is_sharper:
        finding = replace(finding, side=None)
    return [Hypothesis(finding=finding, tokens=np.zeros(len(data.keep), bool), gain=float("inf"))]


def _judged(data: PairData) -> tuple[Side, np.ndarray] | None:
    """Return the side whose logprobs fit its entropies least, and its entropies, [K]. None if there are few, or if they
    belong to another distribution, which data_checks reports."""
    side = max(sides(data), key=lambda each: abs(each.sampled_score))
    if side.own.entropy is None or data.num_kept < 400 or side.own.share_lost > MOST_LOST:
        return None
    return None if any(unscaled_ratio(data.sample, side.own)) else (side, side.own.entropy[data.keep])


def unapplied_setting(data: PairData) -> dict[str, Any]:
    """Describe a recorded setting (`signal`) that the samples of two equal passes contradict. Empty if there is none.

    Unless the logprobs were renormalised, they and the entropy H rule out some tokens. If top_p keeps a token with
    probability p, more than 1 - top_p of the probability mass is on tokens that are at most as likely, so H exceeds
    (1 - top_p) * -ln(p). The largest probability is at least exp(-H), so min_p keeps no p below min_p * exp(-H).
    """
    data = data.within(data.updates_behind[data.seq] == 0)
    if not data.num_kept or np.median(logit_error(data)) > allowed_noise(data):
        return {}  # the distribution of a wrong model says nothing about the samples
    if (found := _judged(data)) is None or ratio_in_bits(-found[0].values, found[1]):
        return {}
    (side, entropy), heat = found, data.sample.settings["temperature"]
    top_p, min_p = (data.sample.settings[name][data.seq] for name in ("top_p", "min_p"))
    is_clear = side.sampled_score >= CLEAR and side.sampled_mean >= 0.05
    if is_clear and np.all((heat > 0) & (heat <= 1)) and not _is_plain(data) and not recorded_filter(data):
        numbers = {"temperature": float(np.median(heat)), "is_below_1": bool(np.min(heat) < 1)}
        return {"signal": "temperature", "mean": side.sampled_mean, **numbers}
    likely, at_most = (side.values > np.log(0.9)) & (side.values < 0), 1.1 * entropy + 0.1
    # Renormalised probabilities of likely tokens are 1. With min_p, renormalising rules out fewer tokens, not others.
    is_whole = likely.sum() >= max(FEW, 3 * (side.values == 0).sum())
    for name, values, needed, is_on in (
        ("top_p", top_p, -side.values * (1 - top_p), (top_p < 1) & is_whole),
        ("min_p", min_p, np.log(np.maximum(min_p, 1e-30)) - side.values, min_p > 0),
    ):
        left_out = float(np.mean((needed > at_most)[is_on])) if is_on.any() else 0.0
        if left_out >= 0.01:
            return {"signal": name, name: float(np.median(values[is_on])), "left_out": left_out}
    return {}


def _is_plain(data: PairData) -> bool:
    is_plain = all(np.all(data.sample.settings[name] == 1.0) for name in ("temperature", "top_p"))
    return is_plain and not recorded_filter(data)


def recorded_penalty(data: PairData) -> float | None:
    values = data.sample.settings["repetition_penalty"]
    other = values[np.isfinite(values) & (values != 1.0) & (values > 0)]
    return float(np.median(other)) if len(other) else None
