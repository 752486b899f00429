"""Tables in sums/: per-sequence sums for pairs of passes, so that statistics need not read tokens."""

from __future__ import annotations

import pyarrow as pa

from .tables import Column, Table


def _count(name: str, doc: str) -> Column:
    return Column(name, pa.int64(), doc, unit="tokens", null="")


def _sum(name: str, doc: str, unit: str = "") -> Column:
    return Column(name, pa.float64(), doc, unit=unit, null="no token has a finite logprob in both passes")


_PAIR = (
    Column("pass_a", pa.string(), "pass a of the pair: d = logprob(a) - logprob(b)", null=""),
    Column("pass_b", pa.string(), "pass b of the pair", null=""),
)

SEQUENCE_SUMS = Table(
    name="sequence_sums",
    doc="One row per (pair, step, sequence, iterations). a and b are a token's logprobs in the two passes, and "
    "d = a - b. Sums cover the tokens that contribute to the loss and have a finite logprob in both passes.",
    columns=(
        *_PAIR,
        Column("step", pa.int64(), "the sequence's step", null=""),
        Column("seq_id", pa.string(), "the sequence", null=""),
        Column("iteration_a", pa.int32(), "`iteration` of the row in `scores` for pass a", null=""),
        Column("iteration_b", pa.int32(), "`iteration` of the row in `scores` for pass b", null=""),
        _count("num_tokens", "number of tokens with a finite logprob in both passes"),
        _count("num_nan", "number of tokens with NaN in either pass; excluded from the sums"),
        _count("num_inf", "number of tokens with an infinite logprob and no NaN; excluded from the sums"),
        _sum("sum_d", "sum of d", "nats"),
        _sum("sum_abs_d", "sum of |d|", "nats"),
        _sum("sum_d2", "sum of d squared", "nats^2"),
        _sum("sum_k3", "sum of exp(d) - 1 - d", "nats"),
        _sum("max_abs_d", "largest |d|", "nats"),
        _sum("sum_expm1_d", "sum of exp(d) - 1"),
        _sum("sum_expm1_2d", "sum of exp(2 d) - 1"),
        _sum("peak_d", "largest d", "nats"),
        _sum("sum_weight", "sum of exp(d - peak_d)"),
        _sum("sum_weight2", "sum of exp(2 (d - peak_d))"),
        _count("num_outside", "number of tokens with exp(d) below 0.8 or above 1.25"),
        _sum("sum_prob_diff", "sum of |exp(a) - exp(b)|"),
        _sum("max_prob_diff", "largest |exp(a) - exp(b)|"),
        _sum("peak_a", "largest a", "nats"),
        _sum("peak_b", "largest b", "nats"),
        _sum("mean_fall_a", "mean of exp(a - peak_a) - 1"),
        _sum("mean_fall_b", "mean of exp(b - peak_b) - 1"),
        _sum("spread_prob_a", "sum of squared deviations of exp(a) from its mean"),
        _sum("spread_prob_b", "sum of squared deviations of exp(b) from its mean"),
        _sum("spread_prob_ab", "sum over tokens of the product of both deviations"),
    ),
)

_CUTS = (
    _count("num_tokens", "number of tokens from which the quantiles were computed"),
    _sum("p50_abs_d", "median of |d|", "nats"),
    _sum("p95_abs_d", "95th percentile of |d|", "nats"),
    _sum("p99_abs_d", "99th percentile of |d|", "nats"),
)

STEP_QUANTILES = Table(
    name="step_quantiles",
    doc="One row per (pair, step): quantiles, which cannot be computed from sums.",
    columns=(*_PAIR, Column("step", pa.int64(), "the step", null=""), *_CUTS),
)

STEP_HISTOGRAMS = Table(
    name="step_histograms",
    doc="One row per (pair, step, non-empty bin): the number of tokens whose |d| is in the bin. These counts, summed over "
    "steps, give quantiles within a relative error of 2^-10.",
    columns=(
        *_PAIR,
        Column("step", pa.int64(), "the step", null=""),
        Column("bin", pa.int32(), "upper 21 bits of |d| as a double: sign, exponent and 9 bits of the mantissa; 0: |d| = 0", null=""),
        _count("num_tokens", "number of tokens in the bin"),
    ),
)  # fmt: skip

RUN_QUANTILES = Table(
    name="run_quantiles",
    doc="One row per pair: quantiles over the whole run.",
    columns=(
        *_PAIR,
        *_CUTS,
        Column("quantile_error", pa.float64(), "bound on the relative error of the quantiles: 0 if exact, 2^-10 if computed from histograms", null=""),
    ),
)  # fmt: skip

_STATISTICS = (
    Column(
        "num_sequences", pa.int64(), "number of sequences with at least one finite token", unit="sequences", null=""
    ),
    _count("num_tokens", "number of tokens with a finite logprob in both passes"),
    _count("num_nan", "number of tokens with NaN in either pass"),
    _count("num_inf", "number of tokens with an infinite logprob and no NaN in either pass"),
    _sum("k1", "mean of -d", "nats"),
    _sum("k2", "mean of d squared / 2", "nats^2"),
    _sum("k3", "mean of exp(d) - 1 - d", "nats"),
    _sum("mean_abs_d", "mean of |d|", "nats"),
    _sum("rms_d", "root mean square of d", "nats"),
    _sum("max_abs_d", "largest |d|", "nats"),
    _sum("share_outside", "share of tokens with exp(d) below 0.8 or above 1.25"),
    _sum("prob_diff_mean", "mean of |exp(a) - exp(b)|"),
    _sum("prob_diff_max", "largest |exp(a) - exp(b)|"),
    _sum("prob_pearson", "Pearson correlation of exp(a) and exp(b)"),
    _sum("log_ppl_abs_diff_sum", "mean over sequences of |sum of d|", "nats"),
    _sum("log_ppl_abs_diff_mean", "mean over sequences of |mean of d|", "nats"),
    _sum("ess_token", "effective sample size with weights exp(d), as a share"),
    _sum("ess_sequence", "effective sample size with weights exp(sum of d) per sequence, as a share"),
    _sum("chi2_token", "mean of exp(2 d) - 1"),
    _sum("chi2_sequence", "mean over sequences of exp(2 sum of d) - 1"),
)

STEP_STATISTICS = Table(
    name="step_statistics",
    doc="One row per (pair, step): statistics computed from the sums of its sequences.",
    columns=(*_PAIR, Column("step", pa.int64(), "the step", null=""), *_STATISTICS),
)

RUN_STATISTICS = Table(
    name="run_statistics",
    doc="One row per pair: statistics computed from the sums of all sequences.",
    columns=(*_PAIR, *_STATISTICS),
)

STATISTICS = tuple(column.name for column in _STATISTICS)
"""Statistics stored per group of sequences, in column order."""

OF_RUNS = (RUN_QUANTILES, RUN_STATISTICS)
"""Tables with one row per pair of passes."""

KINDS = {
    table.name: table
    for table in (
        SEQUENCE_SUMS, STEP_QUANTILES, STEP_HISTOGRAMS, STEP_STATISTICS, RUN_QUANTILES, RUN_STATISTICS,
    )
}  # fmt: skip
"""Tables in sums/, by the first part of their file names."""
