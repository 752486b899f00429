"""Measure how a mismatch depends on the token id, and how it is correlated between neighbouring tokens and within
sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...statistics.correlations import pearson
from ..pair_data import PairData, once
from ..thresholds import (
    MIN_CLEAR_PERSISTENCE,
    MIN_EFFECT_TOKENS,
    MIN_PERSISTENCE,
    MIN_SEQUENCE_SCORE,
    MIN_WHOLE_SCORE,
    PERSISTENCE_LAGS,
)


@dataclass(frozen=True, slots=True)
class ErrorStructure:
    """Statistics of log(|d| / (1 - p)), after subtracting its means per token id and per step; 0 if there are too few
    tokens."""

    persistence: float
    """Mean autocorrelation at lags of 1, 2 and 4 tokens. It is high if the mismatch changes inside sequences."""
    sequence_score: float
    """Distance between the share of the variance that is between sequences and the share expected by chance, in
    standard deviations."""
    persistence_within: float = 1.0
    """`persistence` after subtracting each sequence's mean. It is 0 if whole sequences are affected."""

    def changes_inside(self, *, is_excessive: bool) -> bool:
        """Return True if |d| is similar at neighbouring tokens but differs between sequences.

        The threshold for similarity is higher if the mismatch is no larger than rounding (`is_excessive` is False).
        """
        least = MIN_PERSISTENCE if is_excessive else MIN_CLEAR_PERSISTENCE
        if self.persistence_within < least and self.sequence_score > MIN_WHOLE_SCORE:
            return False
        return self.persistence >= least and self.sequence_score >= MIN_SEQUENCE_SCORE


@once
def error_structure(data: PairData) -> ErrorStructure:
    """Measure the structure of a mismatch over the kept tokens."""
    level = data.level_beyond_tokens
    known = np.isfinite(level)
    if known.sum() < 2 * max(PERSISTENCE_LAGS):
        return ErrorStructure(0.0, 0.0)
    _, step = np.unique(data.sample.steps[data.seq], return_inverse=True)
    num = int(step.max()) + 1  # includes final steps without any token that has a finite level
    mean = np.bincount(step[known], level[known], num) / np.maximum(np.bincount(step[known], minlength=num), 1)
    level = level - mean[step]
    count = np.bincount(data.seq[known], minlength=data.sample.num_sequences)
    own = np.bincount(data.seq[known], level[known], len(count)) / np.maximum(count, 1)
    # Subtracting a sequence's mean over n tokens lowers the correlation between its tokens by 1 / n.
    lowered = float(1 / np.average(count, weights=count))
    within = _persistence(level - own[data.seq], known, data.seq) + lowered
    score = variance_between(level[known], data.seq[known])[1]
    return ErrorStructure(_persistence(level, known, data.seq), score, within)


def _persistence(level: np.ndarray, known: np.ndarray, seq: np.ndarray) -> float:
    """Return the autocorrelation of `level`, [K], within sequences, averaged over PERSISTENCE_LAGS."""
    lags = []
    for lag in PERSISTENCE_LAGS:
        same = (seq[lag:] == seq[:-lag]) & known[lag:] & known[:-lag]
        lags.append(pearson(level[lag:][same], level[:-lag][same]))
    return float(np.mean(np.nan_to_num(lags)))


@once
def token_effect(data: PairData) -> tuple[float, float]:
    """Return the adjusted share of the variance of d / (1 - p) explained by token ids, and the distance of that share
    from 0 in standard deviations under pure noise. Both are 0 if there are too few tokens. The largest 1 % of the
    values are clipped.
    """
    known = np.isfinite(data.noise)
    signed = (data.d / np.maximum(data.rest, 1e-9))[known]
    tokens = data.sample.tokens[data.keep][known]
    # Sequences in a group can share a prefix; its repeated tokens are not independent evidence.
    distinct = np.unique(np.stack([tokens, signed]), axis=1)
    tokens, signed = distinct[0].astype(np.int64), distinct[1]
    num, groups = len(signed), len(np.unique(tokens))
    if num < max(MIN_EFFECT_TOKENS, groups + 10):
        return 0.0, 0.0
    cut = float(np.quantile(np.abs(signed), 0.99))
    return variance_between(np.clip(signed, -cut, cut), tokens)


def variance_between(values: np.ndarray, group: np.ndarray) -> tuple[float, float]:
    """Return the adjusted share of the variance of `values`, [K], explained by `group`, [K], and the distance of that
    share from 0 in standard deviations under pure noise. Both are 0 if there is a single group or only one value per
    group."""
    _, place = np.unique(group, return_inverse=True)
    count = np.bincount(place).astype(float)
    num, groups = len(values), len(count)
    if groups < 2 or num <= groups:
        return 0.0, 0.0
    means = np.bincount(place, values) / count
    centred = values - values.mean()
    total = float(centred @ centred)
    explained = float(np.sum(count * (means - values.mean()) ** 2))
    if total <= 0:
        return 0.0, 0.0
    ratio = (explained / (groups - 1)) / max((total - explained) / (num - groups), 1e-30)
    adjusted = 1 - ((total - explained) / (num - groups)) / (total / (num - 1))
    return float(adjusted), float((ratio - 1) / np.sqrt(2 / (groups - 1) + 2 / (num - groups)))
