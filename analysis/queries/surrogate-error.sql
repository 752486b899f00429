-- Error of the surrogate objective, from the recorded responses, one row per step.
-- Unit: that of the reward.
-- Needs: rewards.
-- Source: arXiv 2602.04879: J(a) - J(b) = L - Delta, Delta = E_b[R sum_t (rho_t - 1)(1 - prod_{j>t} rho_j)], rho = exp(d).
--   The sum telescopes to sum_t (rho_t - 1) - (prod_t rho_t - 1).
-- Meaning: first_order is L, the objective of a token-level loss; exact is J(a) - J(b) from whole sequences. current:rollout
--   shows the effect of an update, train:rollout that of the mismatch alone. With large ratios few sequences dominate.
SELECT run, step,
       count(*) AS num_sequences,
       avg(reward * sum_growth) AS first_order,
       avg(reward * expm1(sum_d)) AS exact,
       avg(reward * (sum_growth - expm1(sum_d))) AS surrogate_error,
       avg(abs(reward * (sum_growth - expm1(sum_d)))) AS mean_abs_error
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b, sum(d) AS sum_d, sum(expm1(d)) AS sum_growth
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
    GROUP BY ALL
)
JOIN sequences USING (run, step, seq_id)
WHERE isfinite(reward)
GROUP BY run, step
ORDER BY run, step;
