-- Entropy as recorded and as estimated from sampled tokens, and the mismatch relative to it, one row per step.
-- Unit: nats; ratios are dimensionless.
-- Source: NeMo-RL, approx_entropy = -mean(exp(d) log p_a); prime-rl, kl_ent_ratio = mean k3 / mean entropy; entropy
--   relative to the first step: below 0.4 watch, below 0.2 collapsed.
-- Meaning: entropy near 0 ends exploration; entropy that jumps together with k3 marks a collapse.
SELECT run, step, count(*) AS num_tokens, avg(entropy) AS mean_entropy,
       -avg(exp(d) * logprob_a) AS approx_entropy,
       avg(entropy) / nullif(first_value(avg(entropy)) OVER (PARTITION BY run ORDER BY step), 0) AS share_of_first,
       avg(expm1_minus(d)) / nullif(avg(entropy), 0) AS kl_ent_ratio
FROM pair_entropies('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, step
ORDER BY run, step;
