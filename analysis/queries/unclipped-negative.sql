-- Tokens with a negative advantage and a ratio above the clip, which PPO does not clip, one row per step.
-- Unit: shares of the tokens with an advantage; max_ratio is a ratio.
-- Needs: advantages.
-- Source: arXiv 2512.23075: min(rho A, clip(rho) A) is rho A, unbounded, if A < 0 and rho > 1 + eps; a router flip from
--   0.001 to 0.9 gives a ratio of 900.
-- Meaning: share_of_loss is the share of these tokens in sum |rho A|; if it is large, a few outliers dominate the
--   update. Use current:rollout for a loss that divides by the rollout, current:train for one that divides by the
--   trainer.
SELECT run, step, count(*) AS num_tokens, avg((advantage < 0 AND d > ln(1.2))::INTEGER) AS share_beyond_1_2,
       avg((advantage < 0 AND d > ln(2))::INTEGER) AS share_beyond_2,
       avg((advantage < 0 AND d > ln(10))::INTEGER) AS share_beyond_10,
       max(exp(d)) FILTER (advantage < 0) AS max_ratio,
       coalesce(sum(exp(d) * abs(advantage)) FILTER (advantage < 0 AND d > ln(1.2)), 0)
           / nullif(sum(exp(d) * abs(advantage)), 0) AS share_of_loss
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d) AND advantage IS NOT NULL
GROUP BY run, step
ORDER BY run, step;
