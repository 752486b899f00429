-- Correlation of the mismatch with the advantage, one row per step.
-- Unit: correlations; covariance in nats times the advantage's unit.
-- Needs: advantages.
-- Source: arXiv 2605.14220: mismatch that correlates with the advantage biases the objective before the KL shows it.
-- Meaning: near 0 is harmless; a positive correlation inflates the ratio of reinforced tokens.
SELECT run, step, count(*) AS num_tokens, corr(d, advantage) AS corr_d_advantage,
       corr(d, abs(advantage)) AS corr_d_abs_advantage, covar_pop(d, advantage) AS cov_d_advantage,
       avg(d) FILTER (advantage > 0) AS mean_d_positive, avg(d) FILTER (advantage < 0) AS mean_d_negative
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d) AND advantage IS NOT NULL
GROUP BY run, step
ORDER BY run, step;
