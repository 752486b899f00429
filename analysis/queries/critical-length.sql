-- Response length at which the mean d alone moves a sequence ratio to a clip bound of 2, 5 or 10, one row per step.
-- Unit: tokens; mean_d in nats.
-- Source: richardli.xyz/rl-collapse: T = log C / |mean d| (C = 5 and 0.001 nats per token give 1,609).
-- Meaning: a sequence-level clip at C cuts responses longer than this regardless of their content.
SELECT run, step, avg(d) AS mean_d, ln(2) / nullif(abs(avg(d)), 0) AS tokens_to_2,
       ln(5) / nullif(abs(avg(d)), 0) AS tokens_to_5, ln(10) / nullif(abs(avg(d)), 0) AS tokens_to_10,
       count(*) / count(DISTINCT (seq_id, iteration_a, iteration_b)) AS mean_tokens
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, step
ORDER BY run, step;
