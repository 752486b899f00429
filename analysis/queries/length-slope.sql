-- Linear fit of the sum of d over a response against its length, one row per run.
-- Unit: nats per token; intercept in nats.
-- Source: arXiv 2510.26788 (published values: about -1.01 nats per 1,000 tokens in bfloat16, -0.07 in float16).
-- Meaning: the slope is the bias added per token; it moves sequence ratios away from 1 exponentially with length.
SELECT run, count(*) AS num_sequences, regr_slope(sum_d, num_tokens) AS slope,
       regr_intercept(sum_d, num_tokens) AS intercept, regr_r2(sum_d, num_tokens) AS r2,
       avg(num_tokens) AS mean_tokens
FROM pair_responses('train', 'rollout')
GROUP BY run
ORDER BY run;
