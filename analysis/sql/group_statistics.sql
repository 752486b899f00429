-- Statistics of groups of sequences. Input rows have the columns of sums, grouped_step, the group's largest sum_d (peak) and
-- peak_d (top_d), and the mean of the sequence's probabilities minus the group's median of such means (off_a, off_b).
SELECT grouped.run, grouped.step, num_sequences, grouped.num_tokens, num_nan, num_inf,
       -total_d / grouped.num_tokens AS k1, total_d2 / 2 / grouped.num_tokens AS k2,
       total_k3 / grouped.num_tokens AS k3, total_abs_d / grouped.num_tokens AS mean_abs_d,
       sqrt(total_d2 / grouped.num_tokens) AS rms_d, max_abs_d,
       total_outside / grouped.num_tokens AS share_outside,
       total_prob_diff / grouped.num_tokens AS prob_diff_mean, prob_diff_max,
       correlation(grouped.num_tokens, total_off_a, total_off_b, total_spread_a, total_spread_b, total_spread_ab)
           AS prob_pearson,
       log_ppl_abs_diff_sum, log_ppl_abs_diff_mean,
       total_weight ** 2 / (grouped.num_tokens * total_weight2) AS ess_token, ess_sequence,
       total_expm1_2d / grouped.num_tokens AS chi2_token, chi2_sequence
FROM (
    SELECT run, grouped_step AS step, count(sum_d) AS num_sequences, sum(num_tokens)::BIGINT AS num_tokens,
           sum(num_nan)::BIGINT AS num_nan, sum(num_inf)::BIGINT AS num_inf, total(sum_d) AS total_d,
           total(sum_abs_d) AS total_abs_d, total(sum_d2) AS total_d2, total(sum_k3) AS total_k3,
           max(max_abs_d) AS max_abs_d, total(sum_expm1_2d) AS total_expm1_2d,
           total(sum_weight * exp(peak_d - top_d)) AS total_weight,
           total(sum_weight2 * exp(2 * (peak_d - top_d))) AS total_weight2,
           sum(num_outside)::BIGINT AS total_outside, total(sum_prob_diff) AS total_prob_diff,
           max(max_prob_diff) AS prob_diff_max, total(num_tokens * off_a) AS total_off_a,
           total(num_tokens * off_b) AS total_off_b,
           total(spread_prob_a + num_tokens * off_a * off_a) AS total_spread_a,
           total(spread_prob_b + num_tokens * off_b * off_b) AS total_spread_b,
           total(spread_prob_ab + num_tokens * off_a * off_b) AS total_spread_ab,
           average(abs(sum_d)) AS log_ppl_abs_diff_sum,
           average(abs(sum_d) / num_tokens) AS log_ppl_abs_diff_mean,
           total(exp(sum_d - peak)) ** 2 / (count(sum_d) * total(exp(2 * (sum_d - peak)))) AS ess_sequence,
           average(expm1(2 * sum_d)) AS chi2_sequence
    FROM ({rows})
    GROUP BY run, grouped_step
) AS grouped
