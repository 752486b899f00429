"""Explain the logged loss by its terms: the policy loss, the distance to the reference, and the entropy.

Shapes: S steps, F columns. Several columns can have the same name, because frameworks average a term in different ways.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product

import numpy as np

from ....schemas.loss import CURRENT, PPO, REINFORCE, Loss, read_loss
from ...facts import thresholds as t
from ...facts.conditions import LOGGED, is_coefficient, read_conditions
from ...facts.read_series import read_series
from ...facts.rollouts import read_rollouts
from ...facts.series import Fall
from ...trace.columns import read_hyperparameters, scored_passes
from ...trace.database import Database, cached
from ...trace.source import Pair
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from ..settings import suspect_of

_KL = re.compile(r"(^|[^a-z])kl([^a-z]|$)(?!.*coef)", re.IGNORECASE)
_OF_UPDATES = """
SELECT step, mean_in_order(by_token, iteration) AS by_token, mean_in_order(by_sequence, iteration) AS by_sequence, mean_in_order(sums, iteration) AS sums
FROM (
    SELECT step, iteration, -sum_in_order(list_sum(terms), seq_id) / sum(len(terms)) AS by_token,
           -mean_in_order(list_avg(terms), seq_id) AS by_sequence, -mean_in_order(list_sum(terms), seq_id) AS sums
    FROM (
        SELECT step, seq_id, now.iteration, list_filter(list_transform(now.logprobs, lambda logprob, place: CASE
            WHEN coalesce(response_mask[place], true)
            THEN loss_term(
                clamped_exp(logprob - old.logprobs[place]), coalesce(advantage, advantages[place]), kind := $kind,
                clip_low := $clip_low, clip_high := $clip_high
            ) END), lambda term: term IS NOT NULL) AS terms
        FROM scores AS now
        JOIN scores AS old USING (run, step, seq_id)
        JOIN (SELECT run, step, seq_id, response_mask, advantage, advantages FROM sequences)
        USING (run, step, seq_id)
        WHERE now."pass" = 'current' AND old."pass" = $denominator AND old.iteration = 0
    )
    GROUP BY step, iteration
)
GROUP BY step ORDER BY step
"""
"""The policy loss per step, averaged over an update's tokens or sequences, and then over updates."""


@cached
def read_loss_terms(database: Database, pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps [S], the names [F] and values [S, F] of the loss terms, and the logged loss [S].

    Each form of the policy term has a column: the PPO or REINFORCE loss, -mean(advantage) (the loss at an importance
    ratio of 1), and -mean(advantage * logprob).
    """
    series, rows = read_series(database, pair=pair), read_rollouts(database, pair)
    if "loss" not in series:
        return np.empty(0, np.int64), np.empty(0, str), np.empty((0, 0)), np.empty(0)
    distance, of_logprob = rows.likelihood - rows.reference, rows.advantage * rows.likelihood
    terms = [("entropy", series["entropy"].steps, series["entropy"].values)] if "entropy" in series else []
    terms += [("policy", steps, values) for steps, values in _policy_losses(database)]
    for weights in (None, rows.length):
        terms += [("policy", *rows.by_step(-each, weights)) for each in (rows.advantage, of_logprob)]
        terms.append(("reference", *rows.by_step(distance, weights)))
    terms.append(("policy", *rows.by_step(-of_logprob * rows.length)))
    terms += [
        ("reference", one.steps, one.values)
        for name, one in read_conditions(database).items()
        if name == "reference_k3" or (one.kind == LOGGED and _KL.search(name))
    ]
    steps, loss = series["loss"].steps, series["loss"].values
    kept, known = [], np.isfinite(loss)
    for name, at, values in terms:
        there, aligned = np.isin(at, steps), np.full(len(steps), np.nan)
        aligned[np.searchsorted(steps, at[there])] = values[there]
        if np.isfinite(aligned).mean() > 0.9 and np.ptp(aligned[np.isfinite(aligned)]) > 0:
            kept.append((name, aligned))
            known &= np.isfinite(aligned)
    columns_SF = np.column_stack([np.empty((known.sum(), 0)), *(values[known] for _, values in kept)])
    return steps[known], np.array([name for name, _ in kept], str), columns_SF, loss[known]


def _policy_losses(database: Database) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the steps and the policy loss for each way of averaging, if the `current` pass was recorded."""
    loss = read_loss(read_hyperparameters(database)) or Loss()
    if CURRENT not in scored_passes(database) or loss.denominator == CURRENT or loss.kind not in (PPO, REINFORCE):
        return
    given = {"kind": loss.kind, "clip_low": loss.clip_low, "clip_high": loss.clip_high, "denominator": loss.denominator}
    step, *values = database.connection.execute(_OF_UPDATES, given).fetchnumpy().values()
    yield from ((step, np.ma.filled(each.astype(float), np.nan)) for each in values)


def _choices(names: np.ndarray, usable: np.ndarray) -> Iterator[list[int]]:
    """Yield every combination of at most one column per name, as column indices. `usable` has shape [F]."""
    of_name = [[None, *np.flatnonzero(usable & (names == name))] for name in ("policy", *_SIGNS)]
    for chosen in product(*of_name):
        if places := [int(place) for place in chosen if place is not None]:
            yield places


_SIGNS = {"reference": 1.0, "entropy": -1.0}
"""Loss term -> sign of its coefficient in a loss that is minimised."""
_USUAL = {"reference": 0.1, "entropy": 0.02}
"""Loss term -> largest coefficient that counts as usual if the run declares none."""
_MOST_LEFT_OF_STEPS = 0.5
"""Coefficients are not judged if the terms leave more than this share of the variance of step-to-step loss differences
unexplained."""
_LEAST_ERRORS = 4.0
"""A coefficient counts only if it is larger than this many standard errors."""
_FEWEST_DIFFERENCES = 5


def coefficients(facts: Facts, fall: Fall) -> Iterator[Fact]:
    """Yield loss terms whose coefficient has the wrong sign, or is much larger than declared or usual.

    The coefficients are fitted to differences between successive steps, so that common trends do not count.
    """
    steps, names, columns_SF, loss = read_loss_terms(facts.database, facts.pair)
    since = steps >= fall.interval[0] - t.AHEAD
    columns_SF, loss = columns_SF[since], loss[since]
    change, changes_SF = np.diff(loss), np.diff(columns_SF, axis=0)
    if len(change) < 2 * _FEWEST_DIFFERENCES or not change.any():
        return
    scale = float(np.abs(change).max())
    varies = np.count_nonzero(changes_SF, axis=0) >= _FEWEST_DIFFERENCES
    fits = [_fitted(changes_SF, change / scale, chosen) for chosen in _choices(names, varies)]
    left, found = min(fits, key=lambda fit: fit[0], default=(1.0, []))
    found = [(at, slope * scale, errors) for at, slope, errors in found]
    told = list(_unusual(facts, names, columns_SF, loss, left, found))
    yield from told or _unusual(facts, names, columns_SF, loss, *_implied(names, columns_SF, loss))


def _unusual(
    facts: Facts, names: np.ndarray, columns_SF: np.ndarray, loss: np.ndarray, left: float,
    found: list[tuple[int, float, float]],
) -> Iterator[Fact]:  # fmt: skip
    for at, slope, errors in found:
        term = str(names[at])
        if term == "policy":
            continue
        level = math.sqrt(max(1 - left / _MOST_LEFT_OF_STEPS, 0.0)) * max(1 - _LEAST_ERRORS / max(errors, 1e-9), 0.0)
        level *= min(2 * abs(slope) * float(np.std(columns_SF[:, at]) / max(np.std(loss), 1e-300)), 1.0)
        declared = [
            abs(value) for name, value in facts.settings.items()
            if isinstance(value, float) and suspect_of(name) == term and (is_coefficient(name) or name.endswith("beta"))
        ]  # fmt: skip
        if level and slope * _SIGNS[term] < 0:
            yield fact("loss_term_inverted", level, term, term=term, coefficient=slope)
            continue
        bound, code = (max(*declared, 1e-6), "loss_term_oversized") if declared else (_USUAL[term], "loss_term_unusual")
        if level and (size := of_ratio(abs(slope), 3 * bound, 10.0)) > 0:
            values = {"coefficient": slope, "declared" if declared else "usual": bound}
            yield fact(code, level * size, term, term=term, **values)


def _implied(
    names: np.ndarray, columns_SF: np.ndarray, loss: np.ndarray
) -> tuple[float, list[tuple[int, float, float]]]:
    """Fit `loss` [S] minus the policy loss with a multiple of one other term. Return the same values as `_fitted`.

    The fit has no constant, so that a trend with another cause does not fit.
    """
    best: tuple[float, list[tuple[int, float, float]]] = (1.0, [])
    for policy, other in product(np.flatnonzero(names == "policy"), np.flatnonzero(names != "policy")):
        y, x = loss - columns_SF[:, policy], columns_SF[:, other]
        slope = float(x @ y) / max(float(x @ x), 1e-300)
        rest = float(np.sum((y - slope * x) ** 2))
        left = rest / max(float(np.sum((y - y.mean()) ** 2)), 1e-300)
        if left < best[0]:
            error = math.sqrt(rest / (len(y) - 1) / max(float(x @ x), 1e-300))
            best = (left, [(int(other), slope, abs(slope) / max(error, 1e-300))])
    return best


def _fitted(
    columns_SF: np.ndarray, values: np.ndarray, chosen: list[int]
) -> tuple[float, list[tuple[int, float, float]]]:
    """Fit `values` [S] with the chosen columns.

    Return the unexplained share of the variance, adjusted for the number of columns, and for each column its index, its
    coefficient, and its |coefficient| in standard errors.
    """
    free = len(values) - len(chosen)
    if not chosen or free < _FEWEST_DIFFERENCES:
        return 1.0, []
    scales = np.abs(columns_SF[:, chosen]).max(0)
    columns = columns_SF[:, chosen] / scales
    q, r = np.linalg.qr(columns)
    if np.abs(np.diag(r)).min() < 1e-6:
        return 1.0, []
    inverse = np.linalg.inv(r)
    slopes = inverse @ (q.T @ values)
    variance = float(np.sum((values - columns @ slopes) ** 2)) / free
    errors = np.sqrt(np.maximum(variance * np.sum(inverse**2, 1), 1e-300))
    left = variance * len(values) / float(values @ values)
    return left, list(zip(chosen, (slopes / scales).tolist(), (np.abs(slopes) / errors).tolist(), strict=True))


ALL = (coefficients,)
