"""Recorded values that are not plain logprobs of the sampled tokens: wrong unit, low precision, clamped or unrelated.

Shapes: K kept tokens in S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ....schemas.passes import ROLLOUT
from ...trace.ragged import centred
from .. import commands
from ..features import CLEAR, FEW, Side, counts, exact_rows, judged, judged_words, pearson, same_weights, sides
from ..finding import Broken, Fault, Finding, Hypothesis, Number, certain, of_signs, predicting, scored
from ..pair_data import HALF_ULP, PairData, allowed_noise, context_pairs, half_ulp, precisions, rms, value_rounding
from .sampling import MAX_LEFT

MAX_LOGPROB = 1e-4
"""Maximum logprob (nats). Rounding in a float32 softmax gives at most 1e-6."""
_UNITS: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "log2": ("logarithms of base 2", lambda x: x * np.log(2)),
    "log10": ("logarithms of base 10", lambda x: x * np.log(10)),
    "negative_ln": ("negative logprobs", lambda x: -x),
    "negative_log2": ("negative logarithms of base 2", lambda x: -x * np.log(2)),
    "probability": ("probabilities", np.log),
    "negative_probability": ("negative probabilities, -p", lambda x: np.log(-x)),
    "complement": ("1 - p", lambda x: np.log(1 - x)),
    "negative_complement": ("p - 1", lambda x: np.log(1 + x)),
    "log_complement": ("ln(1 - p)", lambda x: np.log(1 - np.exp(np.minimum(x, 50.0)))),
}
"""Unit -> name, and conversion of the recorded values to nats."""
_NAMES = {unit: name for unit, (name, _) in _UNITS.items()} | {
    "cumulative": "cumulative logprob sums along the sequence",
    "cumulative_to_end": "logprob sums from each token to the end of the sequence",
    "factor": "logprobs times {factor:.4g}",
    "by_length": "logprobs divided by the response length",
    "factor_by_length": "logprobs divided by a per-sequence factor, such as a length",
    "floor": "logarithms of p + {factor:.3g}, so no value is below ln {factor:.3g}",
    "moving_average": "an exponential moving average along the response (weight {factor:.3g} for the current token)",
    "curve": "an unknown function of the other side's logprobs ({curve})",
}


def _unit_text(numbers: Mapping[str, Any]) -> str:
    curve = str(numbers.get("curve")).replace(":", " for ")
    return _NAMES[numbers["unit"]].format_map({"factor": 1.0, **numbers, "curve": curve})


NOT_LOGPROBS = Fault(code="not_logprobs", title="values are not logprobs: some are above 0", broken="recording", evidence={
    "above_zero": "{side} has values above 0 for {num_tokens:,} tokens, from {least:.3g} to {largest:.3g}, but a logprob is at most 0, and no known unit makes these values agree with the other side"
})  # fmt: skip
UNIT = Fault(code="log_base", title="one side's logprobs are not natural logarithms, or are scaled", broken="recording", causes={"clamped": "one side's logprobs are clamped to within a fixed distance of the other's"}, evidence={
    "clamped": "{a} and {b} differ by exactly {limit:.6g} nats, in either direction, at {num_tokens:,} of {of_tokens:,} tokens and never by more, so one side was clamped to within {limit:.6g} nats of the other, which hides the mismatch",
    "other_unit": "{side} contains {unit_text}: excluding the worst 10%, tokens differ by {size:.2g} nats on average as recorded, and by {residual:.2g} after conversion",
}, words={"other_unit": lambda n: {"unit_text": _unit_text(n)}})  # fmt: skip
LOW_PRECISION = Fault(code="low_precision_head", title="one side's head or log-softmax has low precision", broken="computation", causes={"stored": "one side's logprobs are stored with too few digits"}, evidence={
    "rounded_logprobs": "every {side} logprob has {dtype} precision, so the log-softmax was computed or stored in low precision",
    "rounded_values": "every {side} logprob is {grid_text}; this rounding accounts for {rounding:.0%} of the squared mismatch",
    "rounded_logits": "{side}'s logits are rounded to {dtype}, although its contract declares float32, so the head was computed or stored in low precision",
}, words={"rounded_values": lambda n: {"grid_text": _grid_text(n["dtype"])}})  # fmt: skip


def _grid_text(precision: str) -> str:
    number, _, unit = precision.partition(" ")
    if unit == "decimals":
        return f"rounded to {number} decimal{'s' * (number != '1')}"
    if precision.startswith("steps of"):
        return f"a multiple of {precision.split()[-1]}"
    return f"the logarithm of a multiple of {precision.split()[-1]}" if "/" in precision else f"a {precision} number"


UNRELATED = Fault(code="unrelated", title="one side's values do not belong to the sampled tokens", broken="recording", evidence={
    "negative_entropies": "{side} contains the negative entropies of the distributions, not the logprobs of the {num_tokens:,} sampled tokens",
    "most_probable": "{side} is never below {other}, and equal to it where the most probable token was sampled, so {side} contains the logprobs of the most probable tokens, not those of the {num_tokens:,} sampled ones",
    "same_in_context": "{side}, unlike {other}, has equal values in {num_equal:,} of {num_pairs:,} pairs where two different tokens follow the same prefix, so it contains a property of the distribution, such as its entropy or largest logprob, not the sampled tokens' logprobs",
    "no_correlation": "{side} and {other} logprobs are uncorrelated (correlation {correlation:.2f} over {num_tokens:,} tokens, overall or among tokens with the same id){sampled}",
    "scattered": "{num_tokens:,} values in {num_sequences:,} of {of_sequences:,} sequences differ by {size:.2g} nats on average, and at these tokens {side} and {other} are uncorrelated (correlation {correlation:.2f}): the values belong to different tokens",
    "judged": judged("values that were stored, gathered or modified incorrectly"),
}, words={"judged": judged_words}, clauses={"sampled": {
    "unknown": ": they come from different tokens, were reordered, or come from different models",
    "improbable": ", and they average {mean_lower:.3g} nats in {side} but {mean_higher:.3g} in {other}, so {side} scored different tokens or a different text, or one side's weights are broken",
    "from_other": ", and {sampler}'s logprob + entropy averages {sampled_mean:.2g} nats, so the tokens were sampled from {sampler}'s distribution and {side}'s values are not their logprobs",
    "from_neither": ", and {sampler}'s logprob + entropy averages {sampled_mean:.2g} nats, so the tokens were not sampled from {sampler}'s distribution, and one side has broken weights or scored different text",
}}, causes={
    "unknown": "the two sides' values are unrelated: different tokens, a different text, or a broken model on one side",
    "from_neither": "the two sides' values are unrelated: one side has broken weights or scored a different text",
    "improbable": "the two sides' values are unrelated: one side scored a different text or has a broken model",
    "values": "recorded values are not the sampled tokens' logprobs: they were stored, gathered or modified incorrectly",
})  # fmt: skip
MIN_CORRELATION = 0.3
"""Minimum correlation of related passes. It stays above 0.8 with rounding, different weights or a different
temperature, and is about 0 for unrelated values."""


def find_positive(data: PairData) -> Iterator[Hypothesis]:
    for side in sides(data):
        where = side.values > MAX_LOGPROB
        if len(values := side.values[where]):
            next = commands.tokens(data, f"mask AND logprob_{side.key} > {MAX_LOGPROB}")
            numbers = {"num_tokens": len(values), "least": float(values.min()), "largest": float(values.max())}
            yield certain(NOT_LOGPROBS.finding(data, "above_zero", where, next=next, numbers=side.names | numbers))


# --- One side is a function of the other


def find_unit(data: PairData) -> list[Hypothesis]:
    """Explain one side as a function of the other, in all rows or in those that do not agree within rounding."""
    found = [each for side in sides(data) for each in _functions(data, side)]
    _, rows = exact_rows(data)
    if any(each.finding.numbers["unit"] != "curve" for each in found) or not len(rows):
        return found
    part = data.within(np.isin(data.seq, rows))
    for each in (each for side in sides(part) for each in _functions(part, side)):
        counted = {"part_feature": None, "part_sequences": len(rows), "part_of": len(np.unique(data.seq))}
        found.append(replace(each, finding=replace(each.finding, numbers=each.finding.numbers | counted)))
    return found


def _functions(data: PairData, side: Side) -> list[Hypothesis]:
    some = data.within(scored(data))
    if some.num_kept < data.num_kept and not _functions(some, sides(some)[side.key == "b"]):
        return []  # if no function fits part of the rows, none fits all of them
    values, other = side.values, side.others
    if data.num_kept < 8 or min(np.std(values), np.std(other)) < 1e-3:
        return []
    found = []
    for unit, nats, numbers, cost in _conversions(data, values, other):
        typical = rms if unit == "floor" else _typical  # a floor changes only the least probable tokens
        # The residual must also be small compared with the scatter of the values. If logprobs hardly vary, a constant
        # difference (as from lost mass) looks like a factor, and any function fits.
        size, residual = typical(data.d), nats - other
        varied = min(size, *(typical(each - np.median(each)) for each in (data.d, other)))
        left = typical(residual[np.isfinite(residual)])
        if np.mean(np.isfinite(nats)) < 0.99 or left >= (MAX_LEFT if cost <= 2 else MAX_LEFT / 3) * varied:
            continue
        query = "SELECT logprob_a, logprob_b, logprob_a / logprob_b AS ratio FROM {pair} WHERE mask LIMIT 20"
        finding = UNIT.finding(
            data, "other_unit", weight=1 - left / max(size, 1e-12), next=commands.sql(data, query),
            numbers={**side.names, "unit": unit, "residual": left, "size": size, "factor": None, **numbers},
        )  # fmt: skip
        rank = int(cost > 2) + 2 * ((wrong := _wrong_sides(data)) != "" and side.key not in wrong)
        found.append(replace(predicting(data, finding, side.sign * residual, cost, is_right=cost <= 2), rank=rank))
    return found


def _wrong_sides(data: PairData) -> str:
    """Return the keys (`a`, `b`, `ab` or empty) of the sides where most values are above 0, probabilities in one context
    add up to more than 1, or logprob + entropy averages 0 only on the other side."""
    keys = np.stack([data.sample.prefix_keys[data.keep], data.sample.steps[data.seq]])
    context = np.unique(keys, axis=1, return_inverse=True)[1]
    _, first = np.unique(np.stack([context, data.sample.tokens[data.keep]]), axis=1, return_index=True)
    wrong = ""
    for side in sides(data):
        total = np.bincount(context[first], np.exp(np.minimum(side.values[first], 0.0)))
        wrong += side.key if total.max() > 1.02 or np.median(side.values) > MAX_LOGPROB else ""
    better, worse = sorted(sides(data), key=lambda side: abs(side.sampled_score))
    low, high = abs(better.sampled_score), abs(worse.sampled_score)
    return worse.key if not wrong and low > 0 and high > max(CLEAR, 4 * low) else wrong


_Conversion = tuple[str, np.ndarray, dict[str, Number], float]
"""Unit, values in nats, fitted numbers, and the cost of the fitted parameters (nats)."""


def _conversions(data: PairData, values: np.ndarray, other: np.ndarray) -> Iterator[_Conversion]:
    before, starts = np.r_[0.0, values[:-1]], np.r_[True, data.seq[1:] != data.seq[:-1]]
    with np.errstate(divide="ignore", invalid="ignore"):
        known = {unit: convert(values) for unit, (_, convert) in _UNITS.items()}
    off_by = {unit: np.where(np.isfinite(nats), np.abs(nats - other), np.inf) for unit, nats in known.items()}
    unit = min(off_by, key=lambda unit: float(np.median(off_by[unit])))
    yield unit, known[unit], {}, 2.0  # only the best unit, because some are similar for small p
    large = other < (-1.0 if np.sum(other < -1.0) >= FEW else -0.05)
    if large.sum() >= 8:
        factor = float(np.median(values[large] / other[large]))
        if factor > 0:
            yield "factor", values / factor, {"factor": factor}, 8.0
        some = (other < -0.05) & (values < 0)
        count = np.bincount(data.seq[some], minlength=data.sample.num_sequences)
        ratios = np.bincount(data.seq[some], np.log(values[some] / other[some]), len(count))
        factors = np.exp(ratios / np.maximum(count, 1))
        enough = count >= 4
        if np.median(factors) < 1 and enough.sum() >= 8 and np.std(np.log(factors[enough])) > 0.05:
            yield "factor_by_length", values / factors[data.seq], {}, 4.0 * len(np.unique(data.seq))
    yield "by_length", values * data.sample.lengths[data.seq], {}, 2.0
    yield "cumulative", values - np.where(starts, 0.0, before), {}, 2.0
    yield "cumulative_to_end", values - np.where(np.r_[starts[1:], True], 0.0, np.r_[values[1:], 0.0]), {}, 2.0
    design = np.stack([before, other], axis=1)[~starts]
    if len(design) >= FEW:
        (kept, taken), *_ = np.linalg.lstsq(design, values[~starts], rcond=None)
        if kept > 0.05 and taken > 0.05 and abs(kept + taken - 1) < 0.02:
            averaged = np.where(starts, values, (values - kept * before) / taken)
            yield "moving_average", averaged, {"factor": float(taken)}, 8.0
    p = np.exp(np.minimum(other, 0.0))
    offset = float(np.median((np.exp(np.minimum(values, 50.0)) - p)[p <= np.quantile(p, 0.1)]))
    if offset > 1e-12 and np.min(values) > np.log(offset) - 1e-3:
        yield "floor", other + values - np.log(p + offset), {"factor": offset}, 8.0
    some = np.argsort(other, kind="stable")[np.linspace(0, len(other) - 1, 5).astype(int)]
    shape = ", ".join(f"{values[each]:.3g}:{other[each]:.3g}" for each in some)
    yield "curve", _curve(data, values, other), {"curve": shape}, 8.0


def _curve(data: PairData, values: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Predict each token's logprob on the other side, [K], by interpolating between tokens of other bigrams. NaN if the
    relation between the sides is not monotone."""
    _, first, inverse = np.unique(data.sample.bigrams[data.keep], return_index=True, return_inverse=True)
    order = first[np.argsort(values[first], kind="stable")]
    x, y = values[order], other[order]
    is_step = len(np.unique(y)) < len(y) / 2 or len(y) < 100
    if is_step or abs(pearson(np.arange(len(y)), _ranks(y))) < 0.98:
        return np.full(len(values), np.nan)
    own = _ranks(values[first])[inverse]
    below, above = np.searchsorted(x, values, "left") - 1, np.searchsorted(x, values, "right")
    below = np.maximum(below - (below == own), 0)
    above = np.minimum(above + (above == own), len(x) - 1)
    part = (values - x[below]) / np.maximum(x[above] - x[below], 1e-12)
    return np.asarray(y[below] + (y[above] - y[below]) * np.clip(part, 0, 1))


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


def _typical(d: np.ndarray) -> float:
    least = max(int(len(d) * 0.9), 1)
    return float(np.mean(np.partition(np.abs(d), least - 1)[:least])) if len(d) else 0.0


def find_low_precision(data: PairData) -> Iterator[Hypothesis]:
    for side, precision in zip(sides(data), precisions(data), strict=True):
        dtype, following = precision.rounded, commands.replay(data, "--logits-dtype bf16", "head")
        if precision.is_stored:
            continue
        if dtype is not None:
            half = half_ulp(side.values, dtype)
            share = float(np.sum(np.minimum(half**2, data.d**2)) / max(np.sum(data.d**2), 1e-30))
            # Rounding to any other precision comes from storage, not from the head.
            is_stored = dtype not in ("bfloat16", "float16")
            # If no dtype is declared, the pass may have been computed entirely in 16 bits. This rounding must then
            # explain half of the mismatch.
            if share <= (0.02 if precision.declared or is_stored else 0.5):
                continue
            is_named = precision.declared in HALF_ULP and not is_stored
            finding = LOW_PRECISION.finding(
                data, "rounded_values" if is_stored else "rounded_logprobs",
                is_expected=is_named or data.contract(side.key).get("logprobs_dtype") == dtype,
                next=commands.tokens(data) if is_stored else following, broken="recording" if is_stored else None,
                numbers={**side.names, "dtype": dtype, "rounding": share, "cause": "stored" if is_stored else ""},
            )  # fmt: skip
            yield predicting(data, finding, np.sign(data.d) * np.maximum(np.abs(data.d) - half, 0.0), 0.0)
        elif precision.logits in HALF_ULP and precision.declared == "float32":
            numbers = {**side.names, "dtype": precision.logits}
            yield certain(LOW_PRECISION.finding(data, "rounded_logits", next=following, numbers=numbers), 20.0)


def find_clamped(data: PairData) -> list[Hypothesis]:
    """Detect clamping: one side was limited to a fixed distance from the other, so |d| piles up at its maximum."""
    if any(side.rounded is not None for side in precisions(data)):
        return []  # if values are rounded to a grid, many differences are equal
    size = np.abs(data.d)
    limit = float(np.quantile(size, 0.999))
    error = np.maximum(2 * value_rounding(data), 1e-5 * limit)
    at = np.abs(size - limit) < error
    near = (size < limit - error) & (size > 0.8 * limit)
    if at.sum() < 20 or at.sum() < near.sum() or np.any(size > limit + error) or limit < 50 * float(np.median(error)):
        return []
    if min(np.mean(data.d[at] > 0), np.mean(data.d[at] < 0)) < 0.1:
        return []
    numbers = data.names | counts(data, at) | {"limit": limit, "cause": "clamped"}
    return [certain(UNIT.finding(data, "clamped", at, next=commands.far_tokens(data), numbers=numbers))]


# --- A different quantity, or different tokens


def find_other_quantity(data: PairData) -> Iterator[Hypothesis]:
    """Detect a side that recorded a property of the distribution, such as its entropy, instead of logprobs."""
    one, two = context_pairs(data)
    for side in sides(data):
        numbers, next = side.names | counts(data), commands.tokens(data)
        entropy = data.entropy if side.own.entropy is None else side.own.entropy[data.keep]
        left = side.values + (np.nan if entropy is None else entropy)
        is_entropy = entropy is not None and np.std(entropy) > 0.05 and data.rms() > 0.05
        differ = np.abs(side.others[one] - side.others[two]) > 0.3
        equal = np.abs(side.values[one] - side.values[two])[differ] < MAX_LOGPROB
        if is_entropy and np.quantile(np.abs(left), 0.95) < 0.1 * float(np.median(np.abs(data.d))):
            finding = UNRELATED.finding(data, "negative_entropies", next=next, numbers=numbers)
            yield predicting(data, finding, left, 1.0)
        elif _are_of_most_probable(side.values, side.others):
            finding = UNRELATED.finding(data, "most_probable", next=next, numbers=numbers)
            yield of_signs(data, finding, np.full(data.num_kept, side.sign), 1.0)
        # A value that is the same in all contexts is a placeholder.
        elif differ.sum() >= 12 and equal.mean() >= 0.9 and np.std(side.values[one][differ][equal]) >= 0.01:
            numbers |= {"num_equal": int(equal.sum()), "num_pairs": int(differ.sum())}
            finding = UNRELATED.finding(data, "same_in_context", next=next, numbers=numbers)
            # This explanation does not predict d, so its gain is set low, as for uncorrelated values.
            yield certain(finding, 0.1 * data.num_kept)


def _are_of_most_probable(values: np.ndarray, others: np.ndarray) -> bool:
    """Return True if `values` look like logprobs of the most probable tokens: they are never below `others`, and both
    agree where the most probable token was sampled. Elsewhere, the two probabilities sum to at most 1."""
    if len(values) < FEW:
        return False
    raised = values - others
    equal = raised < max(0.05, 2 * -float(np.min(raised)))
    if not 0.1 < equal.mean() < 0.95 or np.min(raised) < -0.5 or raised.max() < 3.0:
        return False
    fits = np.exp(values[~equal]) + np.exp(others[~equal]) <= 1.05
    # The most probable token must have been sampled as often as its mean probability predicts.
    return bool(fits.mean() > 0.995 and abs(equal.mean() - float(np.mean(np.exp(np.minimum(values, 0.0))))) < 0.1)


def find_unrelated(data: PairData) -> list[Hypothesis]:
    if data.num_kept < FEW or data.rms() < 0.05 or min(np.std(data.a), np.std(data.b)) < 1e-3 or same_weights(data):
        return []
    correlation = max(pearson(data.a, data.b), pearson(_ranks(data.a), _ranks(data.b)))
    # Each token id has its own mean, so even values from different contexts correlate. The passes count as related only
    # if they also correlate among tokens with the same id.
    if correlation >= MIN_CORRELATION and (within := _within_ids(data)) is not None:
        correlation = max(within, 0.0)
    if correlation >= MIN_CORRELATION:
        return []
    lower, higher = sorted(sides(data), key=lambda side: float(np.mean(side.values)))
    low, high = float(np.mean(lower.values)), float(np.mean(higher.values))
    is_improbable = low < min(2 * high, high - 1)
    known = [side for side in sides(data) if side.own.entropy is not None]
    sampler = min(known, key=lambda side: abs(side.sampled_score), default=None)
    side, cause = sides(data)[1], "unknown"
    broken: Broken = "computation"
    if sampler is not None and abs(sampler.sampled_score) >= CLEAR and abs(sampler.sampled_mean) >= 0.1:
        side, cause = lower if is_improbable else side, "from_neither"
    elif is_improbable:
        side, cause = lower, "improbable"
        # The engine sampled the tokens, so it should consider them likely. If it does not, the engine is at fault.
        broken = "engine" if lower.own.name == ROLLOUT else broken
    elif sampler is not None:
        side, cause, broken = sides(data)[sampler.key == "a"], "from_other", "recording"
    by, mean = (None, None) if sampler is None else (sampler.own.name, sampler.sampled_mean)
    numbers = side.names | counts(data) | {"cause": cause, "sampled": cause, "correlation": correlation}
    numbers |= {"mean_lower": low, "mean_higher": high, "sampled_mean": mean, "sampler": by}
    next = commands.query(data, "shape")
    finding = UNRELATED.finding(data, "no_correlation", next=next, broken=broken, numbers=numbers)
    return [certain(finding, 0.05 * data.num_kept)]


def _within_ids(data: PairData) -> float | None:
    """Return the rank correlation between the passes among tokens with the same id. None if there are too few repeated
    ids, or if their values vary only by rounding."""
    _, place, num = np.unique(data.sample.tokens[data.keep], return_inverse=True, return_counts=True)
    often = num[place] >= 4
    if often.sum() < 200:
        return None
    least = 5 * allowed_noise(data) * float(np.sqrt(np.mean(data.rest[often] ** 2)))
    if any(np.std(centred(values, place)[often]) <= least for values in (data.a, data.b)):
        return None
    return pearson(*(centred(_ranks(values), place)[often] for values in (data.a, data.b)))


def find_scattered(data: PairData, off: np.ndarray) -> list[Finding]:
    """Report the tokens `off` ([K] bool) if their values look like those of other tokens: uncorrelated with the other
    pass, above and below it about equally often, and with the usual spread."""
    if off.sum() < 20 or min(np.std(data.a[off]), np.std(data.b[off])) < 0.1:
        return []
    within, one_sign = pearson(data.a[off], data.b[off]), abs(float(np.mean(np.sign(data.d[off]))))
    alike = 0.5 < np.std(data.b[off]) / max(float(np.std(data.b)), 1e-9) < 2
    if within > MIN_CORRELATION or one_sign > 0.5 or not alike:
        return []
    numbers = {**sides(data)[0].names, **counts(data, off), "correlation": within}
    numbers["size"] = float(np.mean(np.abs(data.d[off])))
    weight = float(np.sum(data.d[off] ** 2) / np.sum(data.d**2))
    return [UNRELATED.finding(data, "scattered", off, weight=weight, next=commands.far_tokens(data), numbers=numbers)]
