-- Length of runs of tokens with the same sign of d, one row per training run.
-- Unit: tokens; share_positive is a share of the tokens with nonzero d.
-- Source: independent signs, a share p of them positive, change between neighbouring tokens with probability 2 p (1 - p):
--   expected_run = tokens / (first tokens + 2 p (1 - p) neighbours). A token with d = 0, one that does not count or is not
--   finite, and the end of a response end a run.
-- Meaning: mean_run far above expected_run means correlated errors: a wrong state (cache, position, weights) or temperature,
--   not rounding.
SELECT run,
       sum(length)::BIGINT AS num_tokens,
       sum(length) FILTER (direction > 0) / sum(length) AS share_positive,
       count(*) AS num_runs,
       avg(length) AS mean_run,
       sum(length) / (count(*) FILTER (is_first)
                      + 2 * coalesce(share_positive, 0) * (1 - coalesce(share_positive, 0))
                          * (sum(length) - count(*) FILTER (is_first))) AS expected_run,
       max(length) AS longest_run
FROM (
    SELECT run, direction, count(*) AS length, bool_or(coalesce(before, 0) = 0) AS is_first
    FROM (
        SELECT *, sum((direction IS DISTINCT FROM before)::INTEGER) OVER sequence AS stretch
        FROM (
            SELECT *, lag(direction) OVER (PARTITION BY run, step, seq_id, iteration_a, iteration_b ORDER BY position) AS before
            FROM (
                SELECT run, step, seq_id, iteration_a, iteration_b, position,
                       CASE WHEN mask AND isfinite(d) THEN sign(d) ELSE 0 END AS direction
                FROM pair('train', 'rollout')
            )
        )
        WINDOW sequence AS (PARTITION BY run, step, seq_id, iteration_a, iteration_b ORDER BY position)
    )
    WHERE direction <> 0
    GROUP BY run, step, seq_id, iteration_a, iteration_b, stretch, direction
)
GROUP BY run
ORDER BY run;
