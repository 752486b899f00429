-- Tokens without a usable logprob, by problem and side, one row per step.
-- Unit: number of tokens in the loss.
-- Source: none.
-- Meaning: NULL means that the pass returned no logprob, -inf that sampling had excluded the token, and NaN that
--   values overflowed or a row was fully masked.
SELECT run, step, count(*) AS num_tokens, count(*) FILTER (logprob_a IS NULL) AS null_a,
       count(*) FILTER (isnan(logprob_a)) AS nan_a, count(*) FILTER (isinf(logprob_a)) AS inf_a,
       count(*) FILTER (logprob_b IS NULL) AS null_b, count(*) FILTER (isnan(logprob_b)) AS nan_b,
       count(*) FILTER (isinf(logprob_b)) AS inf_b
FROM pair('train', 'rollout')
WHERE mask
GROUP BY run, step
ORDER BY run, step;
