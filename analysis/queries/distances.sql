-- Other published distances, estimated from sampled tokens, one row per step.
-- Unit: k3_reverse and js_sampled in nats; the others are dimensionless.
-- Source: NeMo-RL (policy_kl_error = k3 of -d; js_divergence_error = mean k3 of the passes against their mixture;
--   token_mult_prob_error = mean exp |d|; sampling_importance_ratio = mean exp d); arXiv 2512.23075 (SER = mean over
--   sequences of mean |exp d - 1|).
-- Meaning: NeMo-RL calls token_mult_prob_error below 1.05 and KLs below 0.001 safe; k3_reverse far above k3 means that
--   the trainer gives some sampled tokens almost no probability.
SELECT run, step, count(*) AS num_tokens, avg(expm1_minus(-d)) AS k3_reverse,
       avg(expm1_minus(from_mean_a) + expm1_minus(from_mean_b)) / 2 AS js_sampled,
       avg(exp(abs(d))) AS mult_prob_error, avg(exp(d)) AS is_ratio_mean,
       avg(abs(exp(d) - 1)) AS mean_abs_ratio_error, avg(ser) FILTER (is_first) AS ser,
       stddev_samp(exp(greatest(logprob_a, logprob_b)::DOUBLE) * -expm1(-abs(d))) AS prob_diff_std
FROM (
    -- Logprob of each pass minus that of the mean of both probabilities.
    SELECT *, -ln((1 + exp(-abs(d))) / 2) - greatest(-d, 0) AS from_mean_a,
           -ln((1 + exp(-abs(d))) / 2) - greatest(d, 0) AS from_mean_b,
           avg(abs(exp(d) - 1)) OVER sequence AS ser,
           row_number() OVER (PARTITION BY run, step, seq_id, iteration_a, iteration_b ORDER BY position) = 1 AS is_first
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
    WINDOW sequence AS (PARTITION BY run, step, seq_id, iteration_a, iteration_b)
)
GROUP BY run, step
ORDER BY run, step;
