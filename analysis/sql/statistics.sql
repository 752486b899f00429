-- Statistics from sums. d, k1, k2 and k3 are in nats; the others are dimensionless unless the name has a unit.
--   k1 = mean(-d), k2 = mean(d^2 / 2), k3 = mean(exp(d) - 1 - d)       http://joschu.net/blog/kl-approx.html
--   share_outside = share of tokens with exp(d) outside [0.8, 1.25]
--   log_ppl_abs_diff_sum = mean over sequences of |sum d|               arXiv 2602.01826, eq. 8
--   log_ppl_abs_diff_mean = mean over sequences of |mean d|             verl, rollout_corr/log_ppl_abs_diff
--   ess_token = (sum w)^2 / (n sum w^2) with w = exp(d); ess_sequence the same with w = exp(sum d) of a sequence; both are
--   summed relative to the largest w
--   quantile_error = maximum relative error of p50, p95 and p99 of a run; 0 if exact
--   chi2_token = mean(exp(2 d)) - 1; chi2_sequence = mean(exp(2 sum d)) - 1, neither clamped
-- Sequence means are over the sequences with a comparable token.

-- Correlation from sums of x, y, x^2, y^2 and x y centred near the means, to avoid cancellation.
CREATE OR REPLACE MACRO correlation(n, x, y, xx, yy, xy) AS
    CASE WHEN n * xx - x * x > 0 AND n * yy - y * y > 0
         THEN torch_clamp((n * xy - x * y) / (sqrt(n * xx - x * x) * sqrt(n * yy - y * y)), -1.0, 1.0)
    END;

-- Mean of a sequence's probabilities minus the overall maximum exp(top), divided by exp(top).
CREATE OR REPLACE MACRO fall_from(top, peak, mean_fall) AS expm1(peak - top) + exp(peak - top) * mean_fall;

-- Sums whose digits do not depend on row order; infinities propagate.
CREATE OR REPLACE MACRO total(x) AS CASE WHEN isfinite(sum(x)) THEN fsum(x) ELSE sum(x) END;
CREATE OR REPLACE MACRO average(x) AS total(x) / count(x);

-- pair_sequences(a, b): one row of statistics per sequence.
CREATE OR REPLACE MACRO pair_sequences(a, b) AS TABLE
    SELECT sums.run, sums.step, sums.seq_id, sums.iteration_a, sums.iteration_b,
           (sum_d IS NOT NULL)::INTEGER AS num_sequences, sums.num_tokens, num_nan, num_inf,
           -sum_d / sums.num_tokens AS k1, sum_d2 / 2 / sums.num_tokens AS k2, sum_k3 / sums.num_tokens AS k3,
           sum_abs_d / sums.num_tokens AS mean_abs_d, sqrt(sum_d2 / sums.num_tokens) AS rms_d,
           p50_abs_d, p95_abs_d, p99_abs_d, max_abs_d, num_outside / sums.num_tokens AS share_outside,
           sum_prob_diff / sums.num_tokens AS prob_diff_mean, max_prob_diff AS prob_diff_max,
           correlation(sums.num_tokens, 0.0, 0.0, spread_prob_a, spread_prob_b, spread_prob_ab) AS prob_pearson,
           abs(sum_d) AS log_ppl_abs_diff_sum, abs(sum_d) / sums.num_tokens AS log_ppl_abs_diff_mean,
           sum_weight ** 2 / (sums.num_tokens * sum_weight2) AS ess_token,
           CASE WHEN sum_d IS NOT NULL THEN 1.0::DOUBLE END AS ess_sequence,
           sum_expm1_2d / sums.num_tokens AS chi2_token,
           expm1(2 * sum_d) AS chi2_sequence
    FROM pair_sums(a, b) AS sums
    LEFT JOIN sequence_cuts(a, b) USING (run, step, seq_id, iteration_a, iteration_b)
    ORDER BY sums.run, sums.step, sums.seq_id, sums.iteration_a, sums.iteration_b;

-- group_statistics(a, b, by_step, of_runs, first_step, last_step): statistics without quantiles, per step of a range, or per run
-- with step NULL. A NULL argument selects all runs or leaves that end of the range open.
CREATE OR REPLACE MACRO group_statistics(a, b, by_step, of_runs, first_step, last_step) AS TABLE
    {statistics_of_groups};

-- pair_groups(a, b, by_step): group_statistics with NULL columns for quantiles; reads stored rows if available.
CREATE OR REPLACE MACRO pair_groups(a, b, by_step) AS TABLE
    SELECT run, step, num_sequences, num_tokens, num_nan, num_inf, k1, k2, k3, mean_abs_d, rms_d,
           NULL::DOUBLE AS p50_abs_d, NULL::DOUBLE AS p95_abs_d, NULL::DOUBLE AS p99_abs_d, NULL::DOUBLE AS quantile_error,
           max_abs_d, share_outside, prob_diff_mean, prob_diff_max, prob_pearson,
           log_ppl_abs_diff_sum, log_ppl_abs_diff_mean, ess_token, ess_sequence, chi2_token, chi2_sequence
    FROM (
        FROM kept_groups(a, b, by_step)
        UNION ALL
        FROM group_statistics(
            CASE WHEN NOT CASE WHEN by_step THEN is_covered(a, b) ELSE is_run_covered(a, b) END THEN a END,
            b, by_step, NULL, NULL, NULL
        )
    );

-- One row of statistics per step. The join is by equality, so a condition on step is pushed down to the files of both sides.
CREATE OR REPLACE MACRO pair_steps(a, b) AS TABLE
    SELECT grouped.* EXCLUDE (quantile_error)
           REPLACE (cuts.p50_abs_d AS p50_abs_d, cuts.p95_abs_d AS p95_abs_d, cuts.p99_abs_d AS p99_abs_d)
    FROM pair_groups(a, b, true) AS grouped
    LEFT JOIN step_cuts(a, b) AS cuts ON cuts.run = grouped.run AND cuts.step = grouped.step
    ORDER BY grouped.run, grouped.step;

-- One row of statistics per run.
CREATE OR REPLACE MACRO pair_runs(a, b) AS TABLE
    SELECT grouped.* EXCLUDE (step)
           REPLACE (cuts.p50_abs_d AS p50_abs_d, cuts.p95_abs_d AS p95_abs_d, cuts.p99_abs_d AS p99_abs_d,
                    cuts.quantile_error AS quantile_error)
    FROM pair_groups(a, b, false) AS grouped
    LEFT JOIN run_cuts(a, b) AS cuts ON cuts.run = grouped.run
    ORDER BY grouped.run;
