-- Tokens without a usable logprob, by what is wrong and on which side, a row a step.
-- Unit: tokens that the loss counts.
-- Source: none.
-- Meaning: NULL is "the pass gave none"; -inf is a token that sampling had cut; NaN is an overflow or a fully masked row.
SELECT run, step,
       count(*) AS num_tokens,
       count(*) FILTER (logprob_a IS NULL) AS null_a,
       count(*) FILTER (isnan(logprob_a)) AS nan_a,
       count(*) FILTER (isinf(logprob_a)) AS inf_a,
       count(*) FILTER (logprob_b IS NULL) AS null_b,
       count(*) FILTER (isnan(logprob_b)) AS nan_b,
       count(*) FILTER (isinf(logprob_b)) AS inf_b
FROM pair('train', 'rollout')
WHERE mask
GROUP BY run, step
ORDER BY run, step;
