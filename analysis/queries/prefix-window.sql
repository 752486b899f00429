-- Whether long responses are off from their beginning: the first 4,096 tokens apart from the rest, a row a power of two.
-- Unit: nats; probabilities.
-- Source: fengyao.notion.site/off-policy-rl: the first 4,000 tokens of responses of 20,000 are worse than responses of 4,000.
-- Meaning: read prefix columns down the rows: where they grow with the length, what makes a response long (a loop, another
--   kind of text) makes the gap; where they do not and the rest is worse, the place in the response does.
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
