"""Tables in sums/: per-sequence sums for pairs of passes, from which statistics are computed without reading tokens."""

from __future__ import annotations

import pyarrow as pa

from .tables import Column, Table


def _count(name: str, doc: str) -> Column:
    return Column(name, pa.int64(), doc, unit="tokens", null="")


def _sum(name: str, doc: str, unit: str = "") -> Column:
    return Column(name, pa.float64(), doc, unit=unit, null="no token has a finite logprob in both passes")


_PAIR = (
    Column("pass_a", pa.string(), "first pass in d = logprob(pass_a) - logprob(pass_b)", null=""),
    Column("pass_b", pa.string(), "second pass (see pass_a)", null=""),
)

SEQUENCE_SUMS = Table(
    name="sequence_sums",
    doc="One row per (pair, step, sequence, iteration_a, iteration_b). a and b are a token's logprobs in the two passes, "
    "and d = a - b. Sums cover the tokens that contribute to the loss and have a finite logprob in both passes.",
    columns=(
        *_PAIR,
        Column("step", pa.int64(), "the sequence's step", null=""),
        Column("seq_id", pa.string(), "the sequence", null=""),
        Column("iteration_a", pa.int32(), "`iteration` in `scores` for pass a", null=""),
        Column("iteration_b", pa.int32(), "`iteration` in `scores` for pass b", null=""),
        _count("num_tokens", "tokens with finite logprobs in both passes"),
        _count("num_nan", "tokens with NaN in either pass, excluded from the sums"),
        _count(
            "num_inf", "tokens with an infinite logprob in at least one pass and NaN in none, excluded from the sums"
        ),
        _sum("sum_d", "sum of d", "nats"),
        _sum("sum_abs_d", "sum of |d|", "nats"),
        _sum("sum_d2", "sum of squared d", "nats^2"),
        _sum("sum_k3", "`sum(exp(d) - 1 - d)`", "nats"),
        _sum("max_abs_d", "largest |d|", "nats"),
        _sum("sum_expm1_d", "`sum(exp(d) - 1)`"),
        _sum("sum_expm1_2d", "`sum(exp(2 * d) - 1)`"),
        _sum("peak_d", "largest d", "nats"),
        _sum("sum_weight", "`sum(exp(d - peak_d))`"),
        _sum("sum_weight2", "`sum(exp(2 * (d - peak_d)))`"),
        _count("num_outside", "tokens with exp(d) below 0.8 or above 1.25"),
        _sum("sum_prob_diff", "`sum(abs(exp(a) - exp(b)))`"),
        _sum("max_prob_diff", "largest |exp(a) - exp(b)|"),
        _sum("peak_a", "largest a", "nats"),
        _sum("peak_b", "largest b", "nats"),
        _sum("mean_fall_a", "`mean(exp(a - peak_a) - 1)`"),
        _sum("mean_fall_b", "`mean(exp(b - peak_b) - 1)`"),
        _sum("spread_prob_a", "`sum((exp(a) - mean(exp(a))) ** 2)`"),
        _sum("spread_prob_b", "`sum((exp(b) - mean(exp(b))) ** 2)`"),
        _sum("spread_prob_ab", "`sum((exp(a) - mean(exp(a))) * (exp(b) - mean(exp(b))))`"),
    ),
)

_CUTS = (
    _count("num_tokens", "tokens used to compute the quantiles"),
    _sum("p50_abs_d", "median |d|", "nats"),
    _sum("p95_abs_d", "95th percentile |d|", "nats"),
    _sum("p99_abs_d", "99th percentile |d|", "nats"),
)

STEP_QUANTILES = Table(
    name="step_quantiles",
    doc="One row per (pair, step): quantiles of |d|.",
    columns=(*_PAIR, Column("step", pa.int64(), "the step", null=""), *_CUTS),
)

STEP_HISTOGRAMS = Table(
    name="step_histograms",
    doc="One row per (pair, step, non-empty bin): token counts by |d|. Counts summed over steps give quantiles to within "
    "a relative error of 2^-10.",
    columns=(
        *_PAIR,
        Column("step", pa.int64(), "the step", null=""),
        Column("bin", pa.int32(), "upper 21 bits of |d| as a double (sign, exponent, 9 mantissa bits), or 0 for |d| = 0", null=""),
        _count("num_tokens", "tokens in the bin"),
    ),
)  # fmt: skip

RUN_QUANTILES = Table(
    name="run_quantiles",
    doc="One row per pair: quantiles of |d| over the whole run.",
    columns=(
        *_PAIR,
        *_CUTS,
        Column("quantile_error", pa.float64(), "maximum relative error: 0 if exact, 2^-10 if computed from histograms", null=""),
    ),
)  # fmt: skip

_STATISTICS = (
    Column("num_sequences", pa.int64(), "sequences with at least one finite token", unit="sequences", null=""),
    _count("num_tokens", "tokens with finite logprobs in both passes"),
    _count("num_nan", "tokens with NaN in either pass"),
    _count("num_inf", "tokens with an infinite logprob in at least one pass and NaN in none"),
    _sum("k1", "mean of -d", "nats"),
    _sum("k2", "mean squared d, halved", "nats^2"),
    _sum("k3", "`mean(exp(d) - 1 - d)`", "nats"),
    _sum("mean_abs_d", "mean |d|", "nats"),
    _sum("rms_d", "root mean square d", "nats"),
    _sum("max_abs_d", "largest |d|", "nats"),
    _sum("share_outside", "share of tokens with exp(d) below 0.8 or above 1.25"),
    _sum("prob_diff_mean", "`mean(abs(exp(a) - exp(b)))`"),
    _sum("prob_diff_max", "largest |exp(a) - exp(b)|"),
    _sum("prob_pearson", "Pearson correlation between exp(a) and exp(b)"),
    _sum("log_ppl_abs_diff_sum", "|sum of d| per sequence, averaged over sequences", "nats"),
    _sum("log_ppl_abs_diff_mean", "|mean d| per sequence, averaged over sequences", "nats"),
    _sum("ess_token", "relative effective sample size for token weights exp(d)"),
    _sum("ess_sequence", "relative effective sample size for sequence weights exp(sum d)"),
    _sum("chi2_token", "`mean(exp(2 * d) - 1)`"),
    _sum("chi2_sequence", "exp(2 * sum d) - 1, averaged over sequences"),
)

STEP_STATISTICS = Table(
    name="step_statistics",
    doc="One row per (pair, step): statistics computed from per-sequence sums.",
    columns=(*_PAIR, Column("step", pa.int64(), "the step", null=""), *_STATISTICS),
)

RUN_STATISTICS = Table(
    name="run_statistics",
    doc="One row per pair: statistics computed from all per-sequence sums.",
    columns=(*_PAIR, *_STATISTICS),
)

STATISTICS = tuple(column.name for column in _STATISTICS)

OF_RUNS = (RUN_QUANTILES, RUN_STATISTICS)

_ALL = (SEQUENCE_SUMS, STEP_QUANTILES, STEP_HISTOGRAMS, STEP_STATISTICS, *OF_RUNS)
KINDS = {table.name: table for table in _ALL}
