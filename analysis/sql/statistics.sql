-- From sums to statistics. Units: d in nats; k1, k2, k3 in nats; the rest has no unit unless its name says so.
--   k1 = mean(-d), k2 = mean(d^2 / 2), k3 = mean(exp(d) - 1 - d)       http://joschu.net/blog/kl-approx.html
--   share_outside = share of tokens with exp(d) outside [0.8, 1.25]
--   log_ppl_abs_diff_sum = mean over sequences of |sum d|               arXiv 2602.01826, eq. 8
--   log_ppl_abs_diff_mean = mean over sequences of |mean d|             verl, rollout_corr/log_ppl_abs_diff
--   ess_token = (sum w)^2 / (n sum w^2) with w = exp(d); ess_sequence the same with w = exp(sum d) of a sequence; both are
--   added up relative to the largest w
--   quantile_error = relative error of p50, p95 and p99 of a run, at most; 0 where they are exact
--   chi2_token = mean(exp(2 d)) - 1; chi2_sequence = mean(exp(2 sum d)) - 1, neither clamped
-- Sequence means are over the sequences that have a token to compare.

-- Of sums of x, y, x^2, y^2 and x y that are taken around (about) the means, so that no difference here cancels.
CREATE OR REPLACE MACRO correlation(n, x, y, xx, yy, xy) AS
    CASE WHEN n * xx - x * x > 0 AND n * yy - y * y > 0
         THEN torch_clamp((n * xy - x * y) / (sqrt(n * xx - x * x) * sqrt(n * yy - y * y)), -1.0, 1.0)
    END;

-- The mean of a sequence's probabilities less the largest of all, exp(top), in units of the latter.
CREATE OR REPLACE MACRO fall_from(top, peak, mean_fall) AS expm1(peak - top) + exp(peak - top) * mean_fall;

-- Sums that lose no digits to the order of the rows; an infinity stays one.
CREATE OR REPLACE MACRO total(x) AS CASE WHEN isfinite(sum(x)) THEN fsum(x) ELSE sum(x) END;
CREATE OR REPLACE MACRO average(x) AS total(x) / count(x);

-- One row of statistics a sequence: pair_sequences(a, b).
CREATE OR REPLACE MACRO pair_sequences(a, b) AS TABLE
    SELECT sums.run, sums.step, sums.seq_id, sums.iteration_a, sums.iteration_b,
           (sum_d IS NOT NULL)::INTEGER AS num_sequences, sums.num_tokens, num_nan, num_inf,
           -sum_d / sums.num_tokens AS k1,
           sum_d2 / 2 / sums.num_tokens AS k2,
           sum_k3 / sums.num_tokens AS k3,
           sum_abs_d / sums.num_tokens AS mean_abs_d,
           sqrt(sum_d2 / sums.num_tokens) AS rms_d,
           p50_abs_d, p95_abs_d, p99_abs_d, max_abs_d,
           num_outside / sums.num_tokens AS share_outside,
           sum_prob_diff / sums.num_tokens AS prob_diff_mean,
           max_prob_diff AS prob_diff_max,
           correlation(sums.num_tokens, 0.0, 0.0, spread_prob_a, spread_prob_b, spread_prob_ab) AS prob_pearson,
           abs(sum_d) AS log_ppl_abs_diff_sum,
           abs(sum_d) / sums.num_tokens AS log_ppl_abs_diff_mean,
           sum_weight ** 2 / (sums.num_tokens * sum_weight2) AS ess_token,
           CASE WHEN sum_d IS NOT NULL THEN 1.0::DOUBLE END AS ess_sequence,
           sum_expm1_2d / sums.num_tokens AS chi2_token,
           expm1(2 * sum_d) AS chi2_sequence
    FROM pair_sums(a, b) AS sums
    LEFT JOIN sequence_cuts(a, b) USING (run, step, seq_id, iteration_a, iteration_b)
    ORDER BY sums.run, sums.step, sums.seq_id, sums.iteration_a, sums.iteration_b;

-- One row of statistics a step, or a run with step NULL: pair_groups(a, b, by_step).
CREATE OR REPLACE MACRO pair_groups(a, b, by_step) AS TABLE
    SELECT grouped.run, grouped.step, num_sequences, grouped.num_tokens, num_nan, num_inf,
           -total_d / grouped.num_tokens AS k1,
           total_d2 / 2 / grouped.num_tokens AS k2,
           total_k3 / grouped.num_tokens AS k3,
           total_abs_d / grouped.num_tokens AS mean_abs_d,
           sqrt(total_d2 / grouped.num_tokens) AS rms_d,
           p50_abs_d, p95_abs_d, p99_abs_d, quantile_error, max_abs_d,
           total_outside / grouped.num_tokens AS share_outside,
           total_prob_diff / grouped.num_tokens AS prob_diff_mean,
           prob_diff_max,
           correlation(grouped.num_tokens, total_off_a, total_off_b, total_spread_a, total_spread_b, total_spread_ab)
               AS prob_pearson,
           log_ppl_abs_diff_sum, log_ppl_abs_diff_mean,
           total_weight ** 2 / (grouped.num_tokens * total_weight2) AS ess_token,
           ess_sequence,
           total_expm1_2d / grouped.num_tokens AS chi2_token,
           chi2_sequence
    FROM (
        SELECT run, grouped_step AS step,
               count(sum_d) AS num_sequences,
               sum(num_tokens)::BIGINT AS num_tokens,
               sum(num_nan)::BIGINT AS num_nan,
               sum(num_inf)::BIGINT AS num_inf,
               total(sum_d) AS total_d,
               total(sum_abs_d) AS total_abs_d,
               total(sum_d2) AS total_d2,
               total(sum_k3) AS total_k3,
               max(max_abs_d) AS max_abs_d,
               total(sum_expm1_2d) AS total_expm1_2d,
               total(sum_weight * exp(peak_d - top_d)) AS total_weight,
               total(sum_weight2 * exp(2 * (peak_d - top_d))) AS total_weight2,
               sum(num_outside)::BIGINT AS total_outside,
               total(sum_prob_diff) AS total_prob_diff,
               max(max_prob_diff) AS prob_diff_max,
               total(num_tokens * off_a) AS total_off_a,
               total(num_tokens * off_b) AS total_off_b,
               total(spread_prob_a + num_tokens * off_a * off_a) AS total_spread_a,
               total(spread_prob_b + num_tokens * off_b * off_b) AS total_spread_b,
               total(spread_prob_ab + num_tokens * off_a * off_b) AS total_spread_ab,
               average(abs(sum_d)) AS log_ppl_abs_diff_sum,
               average(abs(sum_d) / num_tokens) AS log_ppl_abs_diff_mean,
               total(exp(sum_d - peak)) ** 2 / (count(sum_d) * total(exp(2 * (sum_d - peak)))) AS ess_sequence,
               average(expm1(2 * sum_d)) AS chi2_sequence
        FROM (
            SELECT *, exp(top_a) * (fall_a - median(fall_a) OVER grouped) AS off_a,
                   exp(top_b) * (fall_b - median(fall_b) OVER grouped) AS off_b
            FROM (
                SELECT *, fall_from(top_a, peak_a, mean_fall_a) AS fall_a, fall_from(top_b, peak_b, mean_fall_b) AS fall_b
                FROM (
                    SELECT *, max(sum_d) OVER grouped AS peak, max(peak_d) OVER grouped AS top_d,
                           max(peak_a) OVER grouped AS top_a, max(peak_b) OVER grouped AS top_b
                    FROM (SELECT *, CASE WHEN by_step THEN step END AS grouped_step FROM pair_sums(a, b))
                    WINDOW grouped AS (PARTITION BY run, grouped_step)
                )
            )
            WINDOW grouped AS (PARTITION BY run, grouped_step)
        )
        GROUP BY run, grouped_step
    ) AS grouped
    LEFT JOIN group_cuts(a, b, by_step) AS quantiles
           ON quantiles.run = grouped.run AND quantiles.step IS NOT DISTINCT FROM grouped.step
    ORDER BY grouped.run, grouped.step;

-- One row of statistics a step.
CREATE OR REPLACE MACRO pair_steps(a, b) AS TABLE
    SELECT * EXCLUDE (quantile_error) FROM pair_groups(a, b, true);

-- One row of statistics a run.
CREATE OR REPLACE MACRO pair_runs(a, b) AS TABLE
    SELECT * EXCLUDE (step) FROM pair_groups(a, b, false);
