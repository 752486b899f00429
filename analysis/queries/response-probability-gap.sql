-- Maximum and mean probability difference within each response, one row per step.
-- Unit: probabilities; shares of the sequences.
-- Source: fengyao.notion.site/off-policy-rl (max and mean of |p - q| over a response; responses with a maximum above 0.5).
-- Meaning: different parallelism and longer responses raise the maximum without changing the mean or a KL.
SELECT run, step,
       count(*) AS num_sequences,
       avg(max_gap) AS mean_of_max,
       max(max_gap) AS max_of_max,
       avg(mean_gap) AS mean_of_mean,
       count(*) FILTER (max_gap > 0.5) AS num_beyond_0_5,
       avg((max_gap > 0.5)::INTEGER) AS share_beyond_0_5
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b,
           max(abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE))) AS max_gap,
           avg(abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE))) AS mean_gap
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
    GROUP BY ALL
)
GROUP BY run, step
ORDER BY run, step;
