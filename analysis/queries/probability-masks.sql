-- Tokens that a trust region on probabilities would mask, a row a step.
-- Unit: shares of the tokens that have an advantage.
-- Needs: advantages.
-- Source: arXiv 2602.04879 (DPPO: masked where |p - q| is above the bound and the ratio moves with the advantage: up where
--   A > 0, down where A < 0); prime-rl masks at 0.2.
-- Meaning: the mask of a clip on ratios hits improbable tokens; this one hits those whose probability really moved.
SELECT run, step,
       count(*) AS num_tokens,
       avg((outward AND gap > 0.1)::INTEGER) AS masked_at_0_1,
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
