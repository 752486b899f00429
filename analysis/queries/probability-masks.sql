-- Tokens that a trust region on probabilities would mask, one row per step.
-- Unit: shares of the tokens with an advantage.
-- Needs: advantages.
-- Source: arXiv 2602.04879 (DPPO: masked if |p - q| exceeds the bound and the ratio changes in the direction of the
--   advantage: up if A > 0, down if A < 0); prime-rl masks at 0.2.
-- Meaning: a clip on ratios masks improbable tokens; this one masks tokens whose probability changed substantially.
SELECT run, step, count(*) AS num_tokens, avg((outward AND gap > 0.1)::INTEGER) AS masked_at_0_1,
       avg((outward AND gap > 0.2)::INTEGER) AS masked_at_0_2,
       avg((outward AND gap > 0.5)::INTEGER) AS masked_at_0_5,
       avg((outward AND gap > 0.2)::INTEGER) FILTER (advantage > 0) AS masked_at_0_2_positive,
       avg((outward AND gap > 0.2)::INTEGER) FILTER (advantage < 0) AS masked_at_0_2_negative
FROM (
    SELECT run, step, advantage, (advantage > 0 AND d > 0) OR (advantage < 0 AND d < 0) AS outward,
           abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE)) AS gap
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d) AND advantage IS NOT NULL
)
GROUP BY run, step
ORDER BY run, step;
