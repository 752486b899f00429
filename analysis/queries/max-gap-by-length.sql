-- Maximum probability difference in a response by its length, one row per power of two.
-- Unit: probabilities; shares of the sequences.
-- Source: fengyao.notion.site/off-policy-rl (responses of 20,000 tokens are far worse than those of 4,000).
-- Meaning: the maximum grows with length even if tokens are equally good; mean_gap, over tokens, does not: if it rises too,
--   long responses are worse per token.
SELECT run, shortest, num_sequences, mean_tokens, mean_of_max, max_of_max, share_beyond_0_5, mean_gap,
       mean_gap / first_value(mean_gap) OVER (PARTITION BY run ORDER BY shortest) AS mean_gap_to_shortest
FROM (
    SELECT run,
           (2 ** floor(log2(num_tokens)))::BIGINT AS shortest,
           count(*) AS num_sequences,
           avg(num_tokens) AS mean_tokens,
           avg(max_gap) AS mean_of_max,
           max(max_gap) AS max_of_max,
           avg((max_gap > 0.5)::INTEGER) AS share_beyond_0_5,
           sum(sum_gap) / sum(num_tokens) AS mean_gap
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens,
               max(abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE))) AS max_gap,
               sum(abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE))) AS sum_gap
        FROM pair('train', 'rollout')
        WHERE mask AND isfinite(d)
        GROUP BY ALL
    )
    GROUP BY run, shortest
)
ORDER BY run, shortest;
