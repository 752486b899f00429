-- Log-odds of two tokens in one context under each pass: correlation, and slope of a on b, one row per step.
-- Unit: slope is dimensionless; residual in nats.
-- Needs: responses of one step to one prompt that continue a common prefix with different tokens.
-- Source: a temperature divides all logits of a context: ln p_a(i) - ln p_a(j) = T_b / T_a (ln p_b(i) - ln p_b(j)).
-- Meaning: a temperature on one side gives a correlation of 1, a slope of T_b / T_a, and a residual near 0; different
--   weights give a correlation well below 1. A slope of 1 with a small residual means that the normaliser causes the
--   mismatch, as with truncation.
SELECT run, step, count(*) AS num_contexts, corr(logprob_a - other_a, logprob_b - other_b) AS corr,
       sum((logprob_a - other_a) * (logprob_b - other_b)) / nullif(sum((logprob_b - other_b) ** 2), 0) AS slope,
       sqrt(avg((logprob_a - other_a - logprob_b + other_b) ** 2)) AS rms_difference
FROM pair_neighbours('train', 'rollout')
WHERE position = shared
GROUP BY run, step
ORDER BY run, step;
