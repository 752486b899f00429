"""What a mismatch depends on, as the numbers that `kinds` judges by.

Shapes: K kept tokens in S sequences.
"""

from __future__ import annotations

import numpy as np

from ..statistics.moments import pearson
from .likelihood import nobodys
from .pair_data import PairData, once
from .rounding import allowed_noise, is_mixture, levels, logit_error
from .structure import (
    MIN_REPEATS,
    along_movement,
    error_structure,
    exact_rows,
    fades,
    growth,
    level,
    not_repeatable,
    repeats,
    sampled_score,
    token_effect,
    variance_between,
)
from .where import later_turn, places, recorded_order, repeated_in_row

FAMILIES = {
    "from": ("position/from", "total_position/from"),
    "before": ("position/before", "total_position/before"),
    "first": ("first_token", "position/one_of"),
    "last": ("last_token", "from_end"),
    "id": ("token_id", "token_repeated"),
    "after": ("token_before", "before_repeated", "starts_turn"),
    "periodic": ("first_of_chunk", "last_of_chunk", "phase", "every"),
    "pack": ("not_first_of", "forward_row"),
    "padding": ("pad_left", "shorter", "prompt_length"),
    "turn": ("later_turn",),
    "seen": ("prompt_seen_before",),
    "time": ("step", "version", "lag"),
    "part": ("row", "writer", "contract", "group_id", "finish_reason", "reward", "advantage"),
    "length": ("response_length", "total_length"),
}
"""Family of places -> the features, or feature/kind, that belong to it."""


@once
def features(data: PairData) -> dict[str, float]:
    """Return the features of the mismatch at the kept tokens, name -> value; each is bounded, and 0 if it cannot be
    measured.
    """
    found = _size(data) | _sampling(data) | _tokens(data) | _positions(data) | _rows(data) | _time(data) | _places(data)
    return {name: float(np.nan_to_num(np.clip(value, -8.0, 8.0))) for name, value in found.items()}


def _size(data: PairData) -> dict[str, float]:
    noise, allowed = logit_error(data), allowed_noise(data)
    middle = float(np.median(noise))
    return {
        "level": _log(level(data) / allowed),
        "median": _log(middle / allowed),
        "tail": _log(float(np.quantile(noise, 0.99)) / max(middle, 1e-9)),
        "tail_90": _log(float(np.quantile(noise, 0.9)) / max(middle, 1e-9)),
        "off": float(nobodys(data).mean()),
        "near": float(np.mean(noise < allowed / 4)),
        "exact": float(np.mean(noise < min(allowed / 20, middle / 5))),
        "mixture": {True: 1.0, None: 0.0, False: -1.0}[is_mixture(data)],
    }


def _sampling(data: PairData) -> dict[str, float]:
    """If the tokens were sampled from a distribution close to both, the mean of d is -mean(d^2) / 2 and the mean of
    exp(d) is 1; errors of recorded values do neither.
    """
    d, num = data.d, data.num_kept
    error = float(d.std()) / np.sqrt(num)
    ratios = [np.exp(np.clip(sign * d, -30, 10)) for sign in (1, -1)]
    scores = [(ratio.mean() - 1) / max(ratio.std() / np.sqrt(num), 1e-12) for ratio in ratios]
    surprise = -(data.a + data.b) / 2
    return {
        "lean": float(d.mean()) / max(float(np.abs(d).mean()), 1e-12),
        "divergence": -float(d.mean()) / max(float(np.mean(d * d)) / 2 + 2 * error, 1e-12),
        "excess_a": _certainty(scores[0]),
        "excess_b": _certainty(scores[1]),
        "sampled_a": _certainty(sampled_score(data, "a")),
        "sampled_b": _certainty(sampled_score(data, "b")),
        "correlation": pearson(data.a, data.b),
        "surprise": pearson(levels(data), surprise),
        "follows_a": pearson(d, data.a),
        "follows_b": pearson(d, data.b),
    }


def _tokens(data: PairData) -> dict[str, float]:
    effect, score = token_effect(data)
    sample, moved = data.sample, _moved(data)
    return {
        "token": effect,
        "token_score": _certainty(score),
        "bigram": variance_between(moved, sample.bigrams[data.keep])[0],
        "before": variance_between(moved, sample.previous[data.keep])[0],
        "token_level": variance_between(levels(data), sample.tokens[data.keep])[0],
        "repeated": _contrast(moved, repeated_in_row(data)),
        "neighbours": _neighbours(data, moved),
    }


def _positions(data: PairData) -> dict[str, float]:
    log, position = levels(data), data.position
    fall, score = fades(data)
    later, later_score = fades(data, position > 0)
    slope, slope_score = _slope(data, np.log1p(position))
    from_end = data.sample.lengths[data.seq] - 1 - position
    total = position + data.sample.prompt_lengths[data.seq]
    turn = later_turn(data.sample)[data.keep]
    return {
        "fall": fall,
        "fall_score": _certainty(score),
        "later_fall": later,
        "later_fall_score": _certainty(later_score),
        "slope": slope,
        "slope_score": _certainty(slope_score),
        **{f"position_{place}": _contrast(log, position == place, position >= 3) for place in range(3)},
        "position": variance_between(log, position)[0],
        "total_position": variance_between(log, total)[0],
        "last": _contrast(log, from_end == 0),
        "has_turns": float(turn.any()),
        "later_turn": _contrast(log, turn),
    }


def _rows(data: PairData) -> dict[str, float]:
    sample, log = data.sample, levels(data)
    rows = np.unique(data.seq)
    mean = (np.bincount(data.seq, log) / np.maximum(np.bincount(data.seq), 1))[rows]
    steps, order = sample.steps[rows], recorded_order(sample)[rows]
    groups = np.unique([f"{sample.steps[row]}/{sample.group_ids[row]}" for row in rows], return_inverse=True)[1]
    structure, twins, allowed = error_structure(data), repeats(data), allowed_noise(data)
    share, score = variance_between(log, data.seq)
    is_known, most, is_unsteady = twins.num >= MIN_REPEATS, max(twins.a, twins.b), not_repeatable(data) is not None
    exact, steady_rows = exact_rows(data)[0], float(np.clip(1 - share, 0.0, 1.0))
    return {
        "row": share,
        "row_score": _certainty(score),
        "row_signed": variance_between(_moved(data), data.seq)[0],
        "group": variance_between(mean, groups)[0],
        "row_in_step": variance_between(mean, steps)[0],
        "every_2": variance_between(mean, order % 2)[0],
        "every_4": variance_between(mean, order % 4)[0],
        "first_of_2": _contrast(mean, order % 2 == 0),
        "first_of_4": _contrast(mean, order % 4 == 0),
        "row_order": pearson(mean, order.astype(float)),
        "prompt_length": pearson(mean, np.log1p(sample.prompt_lengths[rows])),
        "length": pearson(mean, np.log1p(sample.lengths[rows])),
        "exact_rows": exact,
        "persistence": structure.persistence,
        "persistence_within": structure.persistence_within,
        "sequences": _certainty(structure.sequence_score),
        "unsteady": float(is_unsteady),
        "unsteady_rows": is_unsteady * (exact == 0) * steady_rows**4,
        "steady": float(is_known and most < 0.3 * twins.d),
        "twins": float(is_known),
        "twins_a": _log((twins.a + 1e-5) / (twins.d + 1e-5)) if is_known else 0.0,
        "twins_b": _log((twins.b + 1e-5) / (twins.d + 1e-5)) if is_known else 0.0,
        "twins_both": _log((twins.a + 1e-5) / (twins.b + 1e-5)) if is_known else 0.0,
        "twins_level": _log((most + 1e-5) / allowed) if is_known else 0.0,
    }


def _time(data: PairData) -> dict[str, float]:
    grown, steps, along = growth(data), data.sample.steps[data.seq], along_movement(data)
    return {
        "growth": _log(grown.ratio),
        "first_step": _log(grown.first / allowed_noise(data)),
        "along": _certainty(along),
        "along_either": abs(_certainty(along)),
        "step": variance_between(levels(data), steps)[0],
        "trend": pearson(levels(data), steps.astype(float)),
    }


def _places(data: PairData) -> dict[str, float]:
    best = dict.fromkeys(FAMILIES, 0.0)
    for place in places(data):
        for name, members in FAMILIES.items():
            if place.feature.startswith(members) or f"{place.feature}/{place.kind}" in members:
                best[name] = max(best[name], place.gain)
    return {f"at_{name}": float(np.tanh(gain / 100.0)) for name, gain in best.items()}


def _log(ratio: float) -> float:
    return float(np.log(max(ratio, 1e-9)))


def _certainty(score: float) -> float:
    """Return a score in standard errors on a scale from -1 to 1, so that large runs are not judged by their size."""
    return float(np.tanh(score / 6.0))


def _contrast(values: np.ndarray, inside: np.ndarray, outside: np.ndarray | None = None) -> float:
    """Return the difference between the means inside and outside, in standard deviations of the values; 0 if either has
    fewer than 4.
    """
    outside = ~inside if outside is None else outside
    if min(inside.sum(), outside.sum()) < 4:
        return 0.0
    return float(values[inside].mean() - values[outside].mean()) / max(float(values.std()), 1e-9)


def _moved(data: PairData) -> np.ndarray:
    """Return the change [K] of the logit that explains d, with the largest and smallest hundredth clipped, nats."""
    moved = data.d / data.scale
    return np.asarray(np.clip(moved, *np.quantile(moved, [0.01, 0.99])))


def _neighbours(data: PairData, values: np.ndarray) -> float:
    """Return the correlation of neighbouring values within rows."""
    same = data.seq[1:] == data.seq[:-1]
    return pearson(values[1:][same], values[:-1][same])


def _slope(data: PairData, along: np.ndarray) -> tuple[float, float]:
    """Return the slope of the levels along a coordinate within rows, and its distance from 0 in standard errors over
    rows.
    """
    count = np.maximum(np.bincount(data.seq), 1)
    x, y = ((each - (np.bincount(data.seq, each) / count)[data.seq]) for each in (along, levels(data)))
    size = float(x @ x)
    if size < 1e-9:
        return 0.0, 0.0
    slope = float(x @ y) / size
    error = float(np.sqrt(np.sum(np.bincount(data.seq, x * (y - slope * x)) ** 2))) / size
    return slope, slope / max(error, 1e-12)


REASONS: dict[str, tuple[str, str]] = {
    "tail": (
        "a few tokens are off by far more than the others (1 % of them by at least {times:.2g} times the median)",
        "all tokens are off by about the same (1 % of them by at least {times:.2g} times the median)",
    ),
    "exact": ("{v:.0%} of the tokens agree far better than rounding allows", "few tokens agree exactly"),
    "near": ("{v:.0%} of the tokens are at the level of rounding", "only {v:.0%} of the tokens are at the level of rounding"),
    "mixture": ("the model is a mixture of experts", "the model has no experts"),
    "correlation": ("the two sides' logprobs correlate at {v:.2f}", "the two sides' logprobs correlate at only {v:.2f}"),
    "surprise": ("unlikely tokens are off most", "likely tokens are off as much as unlikely ones"),
    "token": ("{v:.0%} of its variance depends on the token id", "it does not depend on the token id"),
    "token_score": ("it depends on the token id", "it does not depend on the token id"),
    "bigram": ("{v:.0%} of its variance depends on the last two token ids", "it differs between places with the same two token ids"),
    "before": ("it depends on the previous token", "it does not depend on the previous token"),
    "repeated": (
        "{a} favours tokens that occurred before in the row more than {b} does",
        "{b} favours tokens that occurred before in the row more than {a} does",
    ),
    "neighbours": ("neighbouring tokens are off in the same direction", "neighbouring tokens are off independently"),
    "fall": ("it fades along the response, {times:.2g}-fold to the last third", "it does not fade along the response"),
    "later_fall": ("it fades along the response, {times:.2g}-fold to the last third", "it does not fade along the response"),
    "slope": ("it grows along the response", "it fades along the response"),
    "slope_score": ("it grows along the response", "it fades along the response"),
    "position_0": ("the first token is off most", "the first token is off less than later ones"),
    "position_1": ("the second token is off more than later ones", "the second token is off less than later ones"),
    "position_2": ("the third token is off more than later ones", "the third token is off less than later ones"),
    "position": ("{v:.0%} of the variance of its size depends on the position", "it does not depend on the position"),
    "total_position": ("{v:.0%} of the variance of its size depends on the position in prompt and response", "it does not depend on the position"),
    "last": ("the last token is off most", "the last token is off less than others"),
    "later_turn": ("later turns are off more", "later turns are off no more than the first"),
    "row": ("{v:.0%} of the variance of its size is between rows", "all rows are off by about the same"),
    "row_score": ("its size differs between rows", "all rows are off by about the same"),
    "row_signed": ("rows are off in one direction each", "rows are off in both directions"),
    "group": ("rows of the same prompt are off by about the same", "rows of the same prompt are off by different sizes"),
    "row_in_step": ("some steps are off by more than others", "all steps are off by about the same"),
    "step": ("some steps are off by more than others", "all steps are off by about the same"),
    "trend": ("it grows over the steps", "it does not grow over the steps"),
    "growth": ("it grows {times:.2g}-fold after the first step", "it has its full size at the first step"),
    "first_step": ("it has its full size at the first step", "the first step is at the level of rounding"),
    "along": ("it follows the updates, as if {b} lagged behind {a}", "it follows the updates, as if {a} lagged behind {b}"),
    "along_either": ("it follows the direction of the updates", "it does not follow the direction of the updates"),
    "exact_rows": ("{v:.0%} of the rows are at the level of rounding and the others are not", "no row agrees"),
    "persistence": ("neighbouring tokens are off by similar sizes (correlation {v:.2f})", "neighbouring tokens are off by unrelated sizes"),
    "persistence_within": ("within rows, neighbouring tokens are off by similar sizes", "within rows, neighbouring tokens are off by unrelated sizes"),
    "twins_a": ("{a} gives the same token after the same prefix different values", "{a} repeats its values"),
    "twins_b": ("{b} gives the same token after the same prefix different values", "{b} repeats its values"),
    "twins_both": ("{a} repeats its values less well than {b}", "{b} repeats its values less well than {a}"),
    "unsteady": ("one side repeats its values after the same prefix, the other does not", "no side is known to be unsteady"),
    "unsteady_rows": (
        "in all rows, one side repeats its values after the same prefix and the other does not", "no side is known to be unsteady",
    ),
    "steady": ("both sides repeat their values after the same prefix", "it is not known whether both sides repeat their values"),
    "prompt_length": ("rows with long prompts are off more", "rows with short prompts are off more"),
    "length": ("long responses are off more", "short responses are off more"),
}  # fmt: skip
"""Feature -> phrase if its value is above the mean of the fitted runs, and if it is below; v is the value."""
