-- Mismatch in the first 4,096 tokens of long responses and in the rest, one row per power of two.
-- Unit: nats; probabilities.
-- Source: fengyao.notion.site/off-policy-rl: the first 4,000 tokens of responses of 20,000 are worse than responses of 4,000.
-- Meaning: read the prefix columns down the rows. If they grow with length, the content of long responses (a loop, another kind
--   of text) causes the mismatch; if only the rest is worse, the position in the response does.
SELECT run,
       (2 ** floor(log2(length)))::BIGINT AS shortest,
       count(DISTINCT (step, seq_id, iteration_a, iteration_b)) AS num_sequences,
       avg(abs(d)) FILTER (position < 4096) AS prefix_mean_abs_d,
       max(gap) FILTER (position < 4096) AS prefix_max_gap,
       avg(abs(d)) FILTER (position >= 4096) AS rest_mean_abs_d,
       max(gap) FILTER (position >= 4096) AS rest_max_gap
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b, position, d,
           abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE)) AS gap,
           count(*) OVER (PARTITION BY run, step, seq_id, iteration_a, iteration_b) AS length
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
)
GROUP BY run, shortest
ORDER BY run, shortest;
