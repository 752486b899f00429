-- Share of tokens with a ratio beyond 1.25, 2, 5 and 10 in either direction, one row per step.
-- Unit: shares of the tokens.
-- Source: arXiv 2510.11370, extreme token distribution: the share with max(exp(d), exp(-d)) above a bound.
-- Meaning: dense models in bfloat16 have 0.6% beyond 1.25; MoE models have a heavier tail, due to router flips.
SELECT run, step, count(*) AS num_tokens, avg((abs(d) > ln(1.25))::INTEGER) AS beyond_1_25,
       avg((abs(d) > ln(2))::INTEGER) AS beyond_2, avg((abs(d) > ln(5))::INTEGER) AS beyond_5,
       avg((abs(d) > ln(10))::INTEGER) AS beyond_10
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, step
ORDER BY run, step;
