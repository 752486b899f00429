"""Features of a mismatch without an exact explanation, and the classifier that finds its likely cause.

The 27 features were selected from 83. On test cases by held-out authors, they identify as many faults as all 83.

Shapes: K kept tokens in S sequences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from ..trace.ragged import centred
from .finding import Number
from .pair_data import PairData, allowed_noise, level, levels, log_odds, logit_error, neighbours, once
from .sample import PassSample, Sample, run_lengths
from .where import later_turn, where_text

CLEAR = 6.0
"""Number of standard errors beyond which a statistic is not due to chance, even though many are tried."""
FEW = 30
"""Minimum number of tokens for a statistic. With fewer, a single token can cause a third of the sum of squares."""
_LAGS = (1, 2, 4)
"""Autocorrelation lags in tokens. They are short so that few pairs of tokens span a change within a sequence."""


@once
def features(data: PairData) -> dict[str, float]:
    d, log, noise, allowed, twins = data.d, levels(data), logit_error(data), allowed_noise(data), repeats(data)
    signed, middle, rows = clipped(d / data.scale), float(np.median(noise)), np.unique(data.seq)
    # In samples from a similar distribution, exp(-d) averages 1 and d averages -mean(d^2) / 2.
    ratio, root = np.exp(np.clip(-d, -30, 10)), np.sqrt(data.num_kept)
    turn, bigrams = later_turn(data.sample)[data.keep], data.sample.bigrams[data.keep]
    repeat, turns = data.num_kept - len(np.unique(bigrams)) >= MIN_REPEATS, min(turn.sum(), (~turn).sum()) >= 4
    share, exact, persistence = variance_between(log, data.seq)[0], exact_rows(data)[0], error_structure(data)
    unsteady = float(not_repeatable(data) is not None)
    found = {
        "level": _log(level(data) / allowed), "median": _log(middle / allowed),
        "tail": _log(float(np.quantile(noise, 0.99)) / max(middle, 1e-9)), "near": float(np.mean(noise < allowed / 4)),
        "first_step": _log(growth(data).first / allowed), "lean": float(d.mean()) / max(float(np.abs(d).mean()), 1e-12),
        "divergence": -float(d.mean()) / max(float(np.mean(d * d)) / 2 + 2 * (float(d.std()) / root), 1e-12),
        "excess_b": _certainty((ratio.mean() - 1) / max(ratio.std() / root, 1e-12)),
        "correlation": pearson(data.a, data.b), "follows_b": pearson(d, data.b),
        "token_score": _certainty(token_effect(data)[1]),
        "bigram": variance_between(signed, bigrams)[0] if repeat else 0.0,
        "later_fall_score": _certainty(fades(data, data.position > 0)[1]),
        "position": variance_between(log, data.position)[0], "has_turns": float(turn.any()),
        "later_turn": float(log[turn].mean() - log[~turn].mean()) / max(float(log.std()), 1e-9) if turns else 0.0,
        "row": share, "row_signed": variance_between(signed, data.seq)[0],
        "row_in_step": variance_between(means(log, data.seq)[rows], data.sample.steps[rows])[0], "exact_rows": exact,
        "persistence": persistence[0], "persistence_within": persistence[1], "sequences": _certainty(persistence[2]),
        "unsteady": unsteady, "unsteady_rows": unsteady * (exact == 0) * float(np.clip(1 - share, 0.0, 1.0)) ** 4,
        "twins_both": _log((twins.a + 1e-5) / (twins.b + 1e-5)) if twins.is_known else 0.0,
        "along": _certainty(along_movement(data)),
    }  # fmt: skip
    return {name: float(np.nan_to_num(np.clip(value, -8.0, 8.0))) for name, value in found.items()}


def means(values: np.ndarray, group: np.ndarray, num: int = 0) -> np.ndarray:
    """Return the mean of `values` [K] in each group, NaN for empty groups. The result has at least `num` elements."""
    count = np.bincount(group, minlength=num)
    return np.where(count > 0, np.bincount(group, values, num) / np.maximum(count, 1), np.nan)


def clipped(values: np.ndarray) -> np.ndarray:
    """Clip `values` to their 1st and 99th percentiles."""
    return np.asarray(np.clip(values, *np.quantile(values, [0.01, 0.99])))


def _log(ratio: float) -> float:
    return float(np.log(max(ratio, 1e-9)))


def _certainty(score: float) -> float:
    return float(np.tanh(score / 6.0))  # bounded, so that large runs do not dominate


def fades(data: PairData, inside: np.ndarray) -> tuple[float, float]:
    """Return by how much the log of the mismatch at `inside` ([K] bool) drops from the first to the last third of a
    response (another prompt's effect fades, other weights' hardly does), and the same in standard errors."""
    beyond = data.level_beyond_tokens
    known = np.isfinite(beyond) & inside
    along = data.position / np.maximum(data.sample.lengths[data.seq], 1)
    thirds = (known & (along < 1 / 3), known & (along >= 2 / 3))
    first, last = (means(beyond[each], data.seq[each], data.sample.num_sequences) for each in thirds)
    falls = (first - last)[np.isfinite(first - last)]
    if len(falls) < 2:
        return 0.0, 0.0
    return float(falls.mean()), float(falls.mean() / max(falls.std() / np.sqrt(len(falls)), 1e-12))


def error_structure(data: PairData) -> tuple[float, float, float]:
    """Return the mean autocorrelation over _LAGS of log(|d| / (1 - p)) without the means per token id and step (high if
    neighbouring tokens have similar mismatches), the same without each sequence's mean (0 if whole sequences are
    affected), and the z-score of the variance between sequences."""
    level = data.level_beyond_tokens.copy()
    known = np.isfinite(level)
    if known.sum() < 2 * max(_LAGS):
        return 0.0, 1.0, 0.0
    seq, within = data.seq[known], level.copy()
    level[known] = centred(level[known], np.unique(data.sample.steps[seq], return_inverse=True)[1])
    within[known] = centred(level[known], seq)
    # Subtracting a mean over n tokens lowers the correlation between a sequence's tokens by 1 / n, so add it back.
    lowered = float(1 / np.average(np.bincount(seq), weights=np.bincount(seq)))
    score = variance_between(level[known], seq)[1]
    return _persistence(level, data.seq), _persistence(within, data.seq) + lowered, score


def _persistence(level: np.ndarray, seq: np.ndarray) -> float:
    lags = []
    for lag in _LAGS:
        same = (seq[lag:] == seq[:-lag]) & np.isfinite(level[lag:] + level[:-lag])
        lags.append(pearson(level[lag:][same], level[:-lag][same]))
    return float(np.mean(np.nan_to_num(lags)))


@once
def token_effect(data: PairData) -> tuple[float, float]:
    """Return `variance_between` token ids of d / (1 - p), clipped at the 99th percentile. 0 for too few tokens."""
    known = np.isfinite(data.noise)
    signed = (data.d / np.maximum(data.rest, 1e-9))[known]
    tokens = data.sample.tokens[data.keep][known]
    # Only one occurrence of each bigram counts, because repetitions (as in a loop) are not independent evidence.
    _, first = np.unique(data.sample.bigrams[data.keep][known], return_index=True)
    tokens, signed = tokens[first], signed[first]
    if len(signed) < max(400, len(np.unique(tokens)) + 10):
        return 0.0, 0.0
    cut = float(np.quantile(np.abs(signed), 0.99))
    return variance_between(np.clip(signed, -cut, cut), tokens)


def variance_between(values: np.ndarray, group: np.ndarray) -> tuple[float, float]:
    """Return the adjusted share of variance in `values` [K] explained by `group` [K], and its z-score under pure noise.
    Both are 0 if there is one group or each group has one value."""
    _, place = np.unique(group, return_inverse=True)
    count = np.bincount(place).astype(float)
    num, groups = len(values), len(count)
    if groups < 2 or num <= groups:
        return 0.0, 0.0
    away = values - values.mean()
    total = float(away @ away)
    explained = float(np.sum(count * (np.bincount(place, values) / count - values.mean()) ** 2))
    if total <= 0:
        return 0.0, 0.0
    left = (total - explained) / (num - groups)
    score = ((explained / (groups - 1)) / max(left, 1e-30) - 1) / np.sqrt(2 / (groups - 1) + 2 / (num - groups))
    return float(1 - left / (total / (num - 1))), float(score)


@once
def along_movement(data: PairData) -> float:
    """Return the correlation between d and the change in pass a's logprobs over the steps, in standard errors: positive if
    pass b lags behind pass a, negative if it is ahead, and 0 for fewer than three steps. Tokens are compared within
    bigrams, after removing the dependence of d on the logprob."""
    sample = data.sample
    steps = sample.steps[data.seq].astype(float)
    if len(np.unique(steps)) < 3 or not data.num_kept:
        return 0.0
    _, place, count = np.unique(sample.bigrams[data.keep], return_inverse=True, return_counts=True)
    d = np.clip(data.d, *np.array([-3.0, 3.0]) * data.rms())
    d = centred(d, np.digitize(data.a, np.quantile(data.a, np.linspace(0, 1, 11)[1:-1])))
    mean_d = np.bincount(place, d) / (count + 3.0)
    products = np.bincount(data.seq, mean_d[place] * centred(steps, place) * np.clip(centred(data.a, place), -3, 3))
    return float(products.sum() / max(np.sqrt(np.sum(products**2)), 1e-30))


# --- Parts of a run that show where a mismatch comes from


class RepeatedTokens(NamedTuple):
    is_known: bool
    """False if there are fewer than MIN_REPEATS repeated tokens."""
    a: float = 0.0
    """Rms difference between pass a's logprobs of the same repeated token, converted to a logit error (nats)."""
    b: float = 0.0
    d: float = 0.0
    """Rms d at the repeated tokens, as a logit error (nats)."""
    agreeing: float = 1.0
    """Share of pairs of repeated tokens, both with a mismatch beyond rounding, whose logprobs agree within rounding in both
    passes. Two versions of the weights make nearly all agree. 1 if too few pairs are known."""


MIN_REPEATS = 20
"""Minimum number of repeated tokens for judging whether a side is deterministic."""


@once
def repeats(data: PairData) -> RepeatedTokens:
    """Compare tokens that have the same prefix, step and temperature."""
    keys, steps = data.sample.token_keys[data.keep], data.sample.steps[data.seq]
    temperature = np.nan_to_num(data.sample.settings["temperature"])[data.seq]
    one, two = neighbours(np.lexsort((data.seq, keys, steps)), keys, steps, temperature)
    one, two = (each[data.rest[one] > 0.05] for each in (one, two))
    if len(one) < MIN_REPEATS:
        return RepeatedTokens(False)
    apart = [
        x / data.scale[one] for x in (data.a[one] - data.a[two], data.b[one] - data.b[two], data.d[one] * np.sqrt(2))
    ]
    off = logit_error(data) > 2 * allowed_noise(data)
    agree = (np.abs(np.stack(apart[:2])).max(axis=0) < allowed_noise(data))[off[one] & off[two]]
    agreeing = float(agree.mean()) if len(agree) >= MIN_REPEATS else 1.0
    a, b, d = (float(np.sqrt(np.mean(x**2) / 2)) for x in apart)
    return RepeatedTokens(True, a, b, d, agreeing)


def frozen(data: PairData) -> tuple[str, dict[str, Any]] | None:
    """Return the side, `a` or `b`, that gives the same tokens with the same prefix the same logprobs from some step on,
    while the other side's change, and their rms changes (logit errors in nats). None with too few such tokens.

    If the side's logprobs follow the other side's at all steps, but less than a third as far, `part` is that share.
    The other side must be deterministic within a step, because noise changes its logprobs without any update. The
    first side must repeat its logprobs for most of the run, because an engine updated every few steps repeats some.
    """
    keys, steps = data.sample.token_keys[data.keep], data.sample.steps[data.seq]
    temperature = np.nan_to_num(data.sample.settings["temperature"])[data.seq]
    one, two = neighbours(np.lexsort((steps, keys)), keys, temperature)
    later = (steps[one] < steps[two]) & (data.rest[one] > 0.05)
    one, two = one[later], two[later]
    apart = {"a": (data.a[one] - data.a[two]) / data.scale[one], "b": (data.b[one] - data.b[two]) / data.scale[one]}
    twins, known = repeats(data), np.unique(steps)
    for since in np.unique(steps[one]) if twins.is_known else ():
        inside = steps[one] >= since
        if inside.sum() < MIN_REPEATS or 2 * (known >= since).sum() <= len(known):
            break
        size = {side: float(np.sqrt(np.mean(values[inside] ** 2) / 2)) for side, values in apart.items()}
        for side, other in ("ba", "ab"):
            part = _part_followed(apart[side], apart[other], steps[two], allowed_noise(data)) if inside.all() else 0.0
            is_still = size[side] < min(size[other] / 10, allowed_noise(data))
            is_frozen = (is_still or part) and getattr(twins, other) < size[other] / 2
            if is_frozen and len(np.unique(steps[two][inside])) > 1:
                moved = {"own": size[side], "moved": size[other], "part": part or None}
                return side, {"since": int(since), "num_tokens": int(inside.sum()), **moved}
    return None


def _part_followed(own: np.ndarray, others: np.ndarray, steps: np.ndarray, noise: float) -> float:
    """Return the share of the `others`' changes ([P] nats) that `own` changes follow, in the earlier half of the tokens as
    in the later, if it is below a third, and otherwise 0. It must leave less than it explains, or less than `noise`
    (nats): the changes of an engine that lags behind resemble the trainer's, too."""
    late = np.argsort(np.argsort(steps, kind="stable")) >= len(steps) // 2
    if min(late.sum(), (~late).sum()) < MIN_REPEATS or not all(
        pearson(own[half], others[half]) > 0.3 for half in (late, ~late)
    ):
        return 0.0
    if pearson(own, others) * np.sqrt(len(own)) < CLEAR:
        return 0.0
    part = float(own @ others) / float(others @ others)
    left, variance = np.mean((own - part * others) ** 2), np.mean(own**2)
    return part if part < 1 / 3 and left < max(variance / 2, 2 * noise**2) else 0.0


class SameWeights(NamedTuple):
    lag: int
    """Number of steps by which pass b's weights are behind pass a's. Negative if they are ahead."""
    tokens: int
    apart: float
    """Median difference of the passes' logits (nats) for the same tokens, `lag` steps apart."""
    own: float
    """The same at the same step."""


@once
def same_weights(data: PairData) -> SameWeights | None:
    """Return the lag, up to three steps, at which the passes agree about tokens with the same prefix although they differ
    at the same step, and although these tokens' logprobs change from step to step. None without at least five such tokens."""
    steps, step = np.unique(data.sample.steps[data.seq], return_inverse=True)
    key = np.unique(data.sample.token_keys[data.keep], return_inverse=True)[1] * (len(steps) + 6) + 3
    a, b, allowed = log_odds(data.a), log_odds(data.b), allowed_noise(data)
    known, first = np.unique(key + step, return_index=True)
    first = first[np.abs(a - b)[first] > 2 * allowed] if len(first) else first
    for lag in (1, -1, 2, -2, 3, -3):
        place = np.minimum(np.searchsorted(known, key[first] + step[first] + lag), len(known) - 1)
        one, other = first, np.unique(key + step, return_index=True)[1][place]
        there = known[place] == key[one] + step[one] + lag
        one, other = one[there], other[there]
        apart, own, moved = np.abs(a[one] - b[other]), np.abs(a[one] - b[one]), np.abs(a[one] - a[other])
        if len(one) < 5 or np.quantile(apart, 0.9) > allowed:
            continue
        middle = float(np.median(apart))
        if 10 * middle < min(np.median(own), np.median(moved)):
            return SameWeights(lag, len(one), middle, float(np.median(own)))
    return None


class Movement(NamedTuple):
    since: int
    """First step at which logprobs differ from earlier ones of the same tokens."""
    tokens: int
    """Number of tokens that occurred with the same prefix before `since`."""
    size: float
    """Median change of their logits (nats)."""


def movement(
    sample: Sample, at: np.ndarray, logprobs: np.ndarray, least: float, versions: np.ndarray | int = 0
) -> Movement | None:
    """Return how far the weights behind the `logprobs` [K] of the tokens `at` ([K] indices) move: by how much logprobs of
    the same token, prefix and, if given, policy version ([K]) change from step to step.

    None if the change is at most `least` nats or not clearly larger than within a step, if fewer than MIN_REPEATS tokens
    repeat, or if a prompt repeats an id 16 times, as placeholders do, because equal ids may then stand for different images.
    """
    if not len(at):
        return None
    seq, heat = sample.seq[at], np.nan_to_num(sample.settings["temperature"])
    same = [sample.token_keys[at], heat[seq], np.broadcast_to(versions, len(at))]
    order = np.lexsort((sample.steps[seq], *same))
    steps, odds, is_clear = sample.steps[seq][order], log_odds(logprobs)[order], logprobs[order] < np.log(0.95)
    is_first = np.r_[True, np.logical_or.reduce([each[order][1:] != each[order][:-1] for each in same])]
    before = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    change = np.where(is_clear & is_clear[before], np.abs(odds - odds[before]), np.nan)
    later, is_new = steps > steps[before], is_first | np.r_[True, steps[1:] != steps[:-1]]  # once per step
    if len(twins := change[~later & ~is_first & np.isfinite(change)]):
        least = max(least, 3 * float(np.median(twins)))
    later &= is_new & np.isfinite(change)
    for since in np.unique(steps[later]):
        now, moved = change[later & (steps == since)], change[later & (steps >= since) & (steps[before] < since)]
        if len(now) >= 5 and len(moved) >= MIN_REPEATS and min(np.median(now), np.median(moved)) > least:
            prompts = [np.array(sample.prompts[row] or []) for row in np.unique(seq)]
            is_image = any(run_lengths(each, np.zeros(len(each))).max(initial=0) >= 16 for each in prompts)
            return None if is_image else Movement(int(since), len(moved), float(np.median(moved)))
    return None


@once
def wrong_versions(data: PairData) -> tuple[str, Movement] | None:
    """Return the side, `a` or `b`, whose policy version does not match its weights: the passes agree, but the same token,
    prefix and version have different logprobs at different steps, in one pass or between the two. None if both match."""
    if not data.num_kept or np.median(logit_error(data)) > allowed_noise(data):
        return None
    at, values = np.flatnonzero(data.keep), {"a": data.a, "b": data.b}
    recorded = {side: getattr(data.sample, side).versions.filled(-1)[data.seq] for side in values}
    for sides in ("a", "b", "ab"):
        versions, logprobs = (np.concatenate([each[side] for side in sides]) for each in (recorded, values))
        known, tokens = versions >= 0, np.tile(at, len(sides))
        if found := movement(data.sample, tokens[known], logprobs[known], allowed_noise(data), versions[known]):
            return sides[-1], found
    return None


def not_repeatable(data: PairData) -> str | None:
    """Return the side, `a` or `b`, whose non-determinism accounts for the mismatch, or None if neither does."""
    found = repeats(data)
    for side, own, other in (("a", found.a, found.b), ("b", found.b, found.a)):
        if found.is_known and own > max(allowed_noise(data) / 2, 3 * other, found.d / 3):
            return side
    return None


class MismatchGrowth(NamedTuple):
    first: float
    """Median logit error at the first step (nats)."""
    later: float
    """Largest median logit error at any later step (nats)."""
    since: int | None
    """First step with a median above the geometric mean of `first` and `later`, if any."""
    is_sudden: bool = False
    """True if the error is flat before `since` and again afterwards, for at least two steps each."""


@once
def growth(data: PairData) -> MismatchGrowth:
    noise, steps = logit_error(data), data.sample.steps[data.seq]
    known = np.unique(steps)
    level = np.array([np.median(noise[steps == step]) for step in known])
    if len(known) < 2:
        return MismatchGrowth(float(level.sum()), 0.0, None)
    first, later = float(level[0]), float(level[1:].max())
    above = np.flatnonzero(level > np.sqrt(max(first, 1e-9) * max(later, 1e-9)))
    if not len(above):
        return MismatchGrowth(first, later, None)
    is_sudden = all(len(part) >= 2 and np.ptp(part) < 0.5 * part.min() for part in np.split(level, above[:1]))
    return MismatchGrowth(first, later, int(known[above[0]]), is_sudden)


class Onset(NamedTuple):
    column: int
    shape: str
    """`event` if the onset is at a fixed response position, else `shards` if the mismatch decays and starts again at
    twice the column, else `window`."""


@once
def onset(data: PairData) -> Onset | None:
    """Return the token position from which the mismatch exceeds rounding, if there is one.

    It is counted from the start of the response, of the prompt, or of the prompt's left padding, whichever fits best.
    """
    log, noise, num = levels(data), logit_error(data), data.num_kept
    total = data.position + data.sample.prompt_lengths[data.seq]
    padding = [np.nan_to_num(side.pad_left)[data.seq] for side in (data.sample.a, data.sample.b)]
    found = []
    for values in (data.position, total, *(total + each for each in padding if each.any())):
        column = values.astype(np.int64)
        size, part = np.cumsum(np.bincount(column))[:-1], np.cumsum(np.bincount(column, log - log.mean()))[:-1]
        is_onset = (np.minimum(size, num - size) >= max(20.0, 0.02 * num)) & (part < 0)
        shares = np.where(is_onset, part**2 * (1 / np.maximum(size, 1) + 1 / np.maximum(num - size, 1)), 0.0)
        found.append((float(shares.max(initial=0.0)), int(shares.argmax()) + 1 if len(shares) else 0, column))
    (of_position, *_), (share, at, column) = found[0], max(found[1:], key=lambda each: each[0])

    def between(first: float, last: float) -> float:
        inside = noise[(column >= first * at) & (column < last * at)]
        return float(np.median(inside)) if len(inside) >= 8 else float("nan")

    begin, end, again = between(1, 1.2), between(1.8, 2), between(2, 2.2)
    # With an attention window, the mismatch grows along the row, because more and more tokens are outside the window.
    # An onset at a fixed response position must then fit better to be chosen.
    is_event = of_position > (1.05 if end > 1.2 * begin else 0.9) * share
    if is_event:
        share, at, column = found[0]
    if share < np.sum((log - log.mean()) ** 2) / 4 or np.median(noise[column < at]) > allowed_noise(data):
        return None
    is_repeated = min(begin, again) > 1.5 * end
    return Onset(at, "event" if is_event else "shards" if is_repeated else "window")


FEW_SPLIT = 8
"""Minimum number of rows that change at a token."""


def parts_of_rows(data: PairData) -> tuple[np.ndarray, bool, dict[str, Number], float] | None:
    """Split each row where the log of its mismatch changes most. Return the tokens that differ ([K] bool: parts of such
    rows, and whole rows), whether these parts come first, the number of either kind of row with the median logit errors
    inside and outside (nats), and the information in the choice of splits and rows (nats).

    None unless many rows change by a clear factor, in the same direction, and hardly change otherwise, and only their
    other parts are at rounding level. (A mismatch that fades has no such token.)"""
    log, seq = levels(data), np.unique(data.seq, return_inverse=True)[1] if data.num_kept else data.seq
    joined = np.diff(seq) == 0
    if joined.sum() < FEW_SPLIT:
        return None
    first = np.flatnonzero(np.r_[True, ~joined])
    size = np.bincount(seq)[seq]
    before = np.arange(len(seq)) - first[seq]
    sums = np.r_[0.0, np.cumsum(log)]
    head, total = sums[:-1] - sums[first][seq], np.bincount(seq, log)[seq]
    with np.errstate(all="ignore"):
        gap = (total - head) / (size - before) - head / before
    share = np.where(np.minimum(before, size - before) >= 2, gap**2 * before * (size - before) / size, 0.0)
    best = np.maximum.reduceat(share, first)
    at = np.maximum.reduceat(np.where(share == best[seq], before, 0), first)  # tokens before the split
    scatter = float(np.median(np.abs(np.diff(log)[joined]))) / 0.6745 / 2**0.5
    rise = gap[first + at]
    is_split = (best > scatter**2 * (10 + 2 * np.log(np.bincount(seq)))) & (np.abs(rise) > np.log(2.5))
    are_first = bool((is_split & (rise < 0)).sum() > (is_split & (rise > 0)).sum())
    chosen = is_split & ((rise < 0) == are_first)
    if chosen.sum() < max(FEW_SPLIT, 5 * (is_split & ~chosen).sum()):
        return None
    is_head = before < at[seq]
    inside = chosen[seq] & (is_head == are_first)
    ends = np.array([log[inside].mean(), log[chosen[seq] & ~inside].mean()])
    whole = ~chosen & (np.bincount(seq, log) / np.bincount(seq) > ends.mean())
    part = np.unique(np.stack([seq, is_head])[:, chosen[seq]], axis=1, return_inverse=True)[1]
    place = centred(before[chosen[seq]].astype(float), part)
    slope = float(place @ centred(log[chosen[seq]], part)) / max(float(place @ place), 1e-9)
    if abs(slope) * np.bincount(part).mean() > 0.3 * (ends[0] - ends[1]):
        return None
    noise, inside = logit_error(data), inside | whole[seq]
    high, low = float(np.median(noise[inside])), float(np.median(noise[~inside]))
    if 2 * whole.sum() > chosen.sum() or high < 5 * low or low > allowed_noise(data) / 4:
        return None
    if high < allowed_noise(data) / 2:
        return None  # rounding, which can grow where a router chose another expert
    cost = float(np.log(np.bincount(seq)[chosen]).sum() + len(first) * np.log(3))
    numbers: dict[str, Number] = {"num_rows": int(chosen.sum()), "of_rows": data.sample.num_sequences}
    return inside, are_first, numbers | {"num_whole": int(whole.sum()), "high": high, "low": low}, cost


def fall(data: PairData) -> int:
    """Return the response position at which the mismatch drops at once by a third or more, as if weights were replaced
    (older weights' keys and values in a cache lose influence slowly), or 0 if there is none."""
    log, width = levels(data), 3
    sums = np.stack([np.bincount(data.position, each) for each in (np.ones(len(log)), log, log**2)])
    sums = np.pad(np.cumsum(sums, axis=1), ((0, 0), (1, 0)))
    size, mean, square = sums[:, width:] - sums[:, :-width]  # of each window of positions
    known = size >= 40
    mean, square = (np.divide(each, size, out=np.full(len(size), np.nan), where=known) for each in (mean, square))
    error = np.sqrt(np.maximum(square - mean**2, 0.0) / np.maximum(size, 1))
    error = np.hypot(error[:-width], error[width:])
    drop = np.pad(mean[:-width] - mean[width:], width, constant_values=np.nan)
    here, before, after = drop[width:-width], drop[: -2 * width], drop[2 * width :]
    is_sudden = (here > np.log(1.5)) & (here > 8 * error) & (here > 2 * np.nan_to_num(np.fmax(before, after)))
    return int(np.where(is_sudden, here, 0.0).argmax()) + width if is_sudden.any() else 0


@once
def exact_rows(data: PairData) -> tuple[float, np.ndarray]:
    """Return the share of sequences that agree within rounding, and the indices of all others. The share is 0 if the two
    groups hardly differ, or if no sequences clearly exceed rounding."""
    noise = logit_error(data)
    order = np.lexsort((noise, data.seq))
    rows, starts, num = np.unique(data.seq[order], return_index=True, return_counts=True)
    middle, rows = noise[order][starts + num // 2][num >= 4], rows[num >= 4]
    order = np.argsort(middle, kind="stable")
    middle, rows = middle[order], rows[order]
    if len(middle) < 20:
        return 0.0, rows[:0]
    logs = np.log(middle + 1e-6)
    first = np.arange(1, len(logs))
    sums = np.cumsum(logs - logs.mean())[:-1]
    between = sums**2 * (1 / first + 1 / (len(logs) - first))
    at = int(np.argmax(between)) + 1
    low, high = float(np.median(middle[:at])), float(np.median(middle[at:]))
    is_parted = between.max() > 0.6 * float(np.sum((logs - logs.mean()) ** 2)) and high > 5 * low
    if not is_parted or high < allowed_noise(data) / 8 or low > allowed_noise(data) / 2:
        return 0.0, rows[:0]
    return at / len(middle), rows[at:]


REASONS: dict[str, tuple[str, str]] = {
    "tail": (
        "a few tokens have a far larger mismatch than the rest (the top 1% at least {times} times the median)",
        "all tokens have a similar mismatch (only the top 1% exceed {times} times the median)",
    ),
    "near": ("{v:.0%} of the tokens agree within rounding", "only {v:.0%} of the tokens agree within rounding"),
    "correlation": ("the correlation between the two sides' logprobs is {v:.2f}", "the correlation between the two sides' logprobs is only {v:.2f}"),
    "token_score": ("the mismatch depends on the token id", "the mismatch does not depend on the token id"),
    "bigram": ("the last two token ids explain {v:.0%} of the mismatch's variance", "the mismatch varies between occurrences of the same token pair"),
    "later_fall_score": ("the mismatch fades along the response", "the mismatch does not fade along the response"),
    "position": ("the position explains {v:.0%} of the variance in mismatch size", "the mismatch does not depend on the position"),
    "later_turn": ("the mismatch is larger in later turns", "the mismatch is no larger in later turns than in the first"),
    "row": ("{v:.0%} of the variance in mismatch size is between rows", "all rows have about the same mismatch"),
    "row_signed": ("within each row, most differences have the same sign", "within rows, differences have both signs"),
    "row_in_step": ("some steps have a larger mismatch than others", "all steps have about the same mismatch"),
    "first_step": ("the mismatch is already large at the first step", "the first step agrees within rounding"),
    "along": ("the mismatch follows the updates, as if {b} lagged behind {a}", "the mismatch follows the updates, as if {a} lagged behind {b}"),
    "exact_rows": ("{v:.0%} of the rows agree within rounding and the rest do not", "rows do not split into a group that agrees and a group that differs"),
    "persistence": ("neighbouring tokens have similar mismatches (correlation {v:.2f})", "neighbouring tokens have unrelated mismatches"),
    "persistence_within": ("within rows, neighbouring tokens have similar mismatches", "within rows, neighbouring tokens have unrelated mismatches"),
    "twins_both": ("{a} is less reproducible than {b}", "{b} is less reproducible than {a}"),
    "unsteady": ("after the same prefix, one side reproduces its values and the other does not", "neither side is known to be non-deterministic"),
    "unsteady_rows": ("in all rows, after the same prefix, one side reproduces its values and the other does not", "neither side is known to be non-deterministic"),
}  # fmt: skip
"""Feature -> two phrases, for values `v` above and below the mean over the fitted runs."""


# --- The fitted model and its evidence

NO_FAULT = "rounding"
MAX_DISTANCE = 4.0
"""Standardised features are clipped to this absolute value. Runs beyond it do not resemble the fitted ones."""

MAX_REASONS = 3
_USUAL = "rounding in {dtypes} usually causes at most {allowed:.2g} nats"
SIZE = f"the logits differ by {{level:.2g}} nats rms; {_USUAL}"
SIZE_AND_PLACE = (
    f"The logits differ by {{up_to}}{{level:.2g}} nats rms{{since_text}}; {_USUAL}{{reason_text}}{{where_text}}"
)


class Model(NamedTuple):
    features: tuple[str, ...]
    kinds: tuple[str, ...]
    mean: np.ndarray
    """[F] means over the fitted runs."""
    scale: np.ndarray
    """[F] standard deviations over the fitted runs."""
    coefficients: np.ndarray
    """[C, F] coefficients of C kinds for F standardised features."""
    intercept: np.ndarray

    def distances(self, measured: dict[str, float]) -> np.ndarray:
        values = np.array([measured[name] for name in self.features])
        return np.asarray(np.clip((values - self.mean) / self.scale, -MAX_DISTANCE, MAX_DISTANCE))

    def probabilities(self, measured: dict[str, float]) -> np.ndarray:
        logits = self.coefficients @ self.distances(measured) + self.intercept
        odds = np.exp(logits - logits.max())
        return np.asarray(odds / odds.sum())


@cache
def model() -> Model:
    stored = json.loads(files(__package__).joinpath("kinds.json").read_text(encoding="ascii"))
    arrays = {name: np.array(stored[name]) for name in ("mean", "scale", "coefficients", "intercept")}
    return Model(features=tuple(stored["features"]), kinds=tuple(stored["kinds"]), **arrays)


@once
def probabilities(data: PairData) -> dict[str, float]:
    found = model().probabilities(features(data))
    return {model().kinds[at]: float(found[at]) for at in np.argsort(-found, kind="stable")}


def reasons(data: PairData, kind: str) -> list[tuple[str, float, bool]]:
    """Return the REASONS that best separate `kind` from others: the feature, its value, and whether it is above the mean."""
    fitted, measured = model(), features(data)
    at, away = fitted.kinds.index(kind), fitted.distances(measured)
    others = np.array([probabilities(data)[name] * (name != kind) for name in fitted.kinds])
    against = others @ fitted.coefficients / max(float(others.sum()), 1e-12)
    worth = away * (fitted.coefficients[at] - against)
    order = [at for at in np.argsort(-worth) if worth[at] > 0.1 and fitted.features[at] in REASONS]
    found = [(fitted.features[at], measured[fitted.features[at]], bool(away[at] > 0)) for at in order]
    # The first step's mismatch may be above the mean, but within rounding, which its phrases compare it with.
    return [each for each in found if each[0] != "first_step" or (each[1] > 0) == each[2]][:MAX_REASONS]


def judged(hint: str) -> str:
    return "probability {probability:.0%}; " + implied(hint)


def implied(hint: str) -> str:
    return f"typical causes: {hint}. {SIZE_AND_PLACE}"


def judged_words(numbers: Mapping[str, Any]) -> dict[str, Any]:
    said = []
    for reason in (f"reason_{at}" for at in range(MAX_REASONS) if f"reason_{at}" in numbers):
        value, phrase = numbers[f"{reason}_value"], REASONS[numbers[reason]][1 - numbers[f"{reason}_above"]]
        said.append(phrase.format(v=value, times=times_text(np.exp(abs(value))), **numbers))
    where, since = "", numbers.get("since")
    if numbers.get("feature"):
        rows = f"{numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences"
        where = f"; the affected tokens, {where_text(numbers)}, are in {rows} and have {times_text(numbers['ratio'])} times the mismatch of the rest"
    return {
        "dtypes": dtypes_text(numbers), "up_to": "" if since is None else "up to ",
        "reason_text": "".join(f"; {each}" for each in dict.fromkeys(said)), "where_text": where,
        "since_text": "" if since is None else f" at a single step, from step {since} on",
    }  # fmt: skip


def dtypes_text(numbers: Mapping[str, Any]) -> str:
    one, other = numbers["dtype_a"], numbers["dtype_b"]
    if one == other:
        return "unknown dtypes" if one is None else f"{one} on both sides"
    return " and ".join(f"{numbers[f'dtype_{side}'] or 'an unknown dtype'} ({numbers[side]})" for side in "ab")


def times_text(ratio: float) -> str:
    """Format a factor with up to three significant digits and no exponent.

    >>> times_text(3.14159), times_text(54231.0)
    ('3.14', '54,200')
    """
    return f"{float(f'{ratio:.3g}'):,.12g}"


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation, or NaN for fewer than two values or a constant series."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


class Side(NamedTuple):
    """One of the two passes (`own`), compared with the other. d is `sign` * (`values` - `others`)."""

    key: str
    """`a` or `b`."""
    own: PassSample
    other: PassSample
    values: np.ndarray
    """[K] logprobs of the kept tokens."""
    others: np.ndarray
    sign: float
    sampled_mean: float
    """Mean of logprob + entropy (nats). Near 0 if this pass sampled the tokens. NaN if no entropies were recorded."""
    sampled_score: float
    """`sampled_mean` in standard errors over sequences. 0 if no entropies were recorded."""

    @property
    def names(self) -> dict[str, Number]:
        return {"side": self.own.name, "other": self.other.name}


@once
def sides(data: PairData) -> tuple[Side, Side]:
    a, b = data.sample.a, data.sample.b
    one = Side("a", a, b, data.a, data.b, 1.0, *_sampled(data, a.entropy, data.a))
    return one, Side("b", b, a, data.b, data.a, -1.0, *_sampled(data, b.entropy, data.b))


def _sampled(data: PairData, entropy: np.ndarray | None, logprobs: np.ndarray) -> tuple[float, float]:
    values = logprobs + (np.nan if entropy is None else entropy[data.keep])
    there = np.isfinite(values)
    mean = float(values[there].mean()) if there.any() else float("nan")
    if there.sum() < FEW:
        return mean, 0.0
    total = np.bincount(np.unique(data.seq[there], return_inverse=True)[1], values[there])
    return mean, float(total.sum() / max(total.std() * np.sqrt(len(total)), 1e-9))


def counts(data: PairData, tokens: np.ndarray | None = None) -> dict[str, Number]:
    """Count all kept tokens and sequences, and those in `tokens` ([K] bool, by default all)."""
    seq = data.seq if tokens is None else data.seq[tokens]
    num = {"num_sequences": len(np.unique(seq)), "of_sequences": len(np.unique(data.seq))}
    return {"num_tokens": len(seq), "of_tokens": data.num_kept, **num}
