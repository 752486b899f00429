-- Whether neighbouring tokens are off together, a row a run.
-- Unit: correlations of d with d so many tokens later in the response, over the pairs of which both count and are finite.
-- Source: the error of a token reaches the next ones through the KV cache.
-- Meaning: rounding gives about 0; a large one says that a state (cache, position, weights) is off for a stretch.
SELECT run,
       count(d) AS num_tokens,
       corr(d, after_1) AS lag_1,
       corr(d, after_2) AS lag_2,
       corr(d, after_8) AS lag_8,
       corr(d, after_32) AS lag_32
FROM (
    SELECT run, d,
           lead(d, 1) OVER sequence AS after_1, lead(d, 2) OVER sequence AS after_2,
           lead(d, 8) OVER sequence AS after_8, lead(d, 32) OVER sequence AS after_32
    -- Every position of a response is a row, so that a row further is a token further.
    FROM (SELECT * REPLACE (CASE WHEN mask AND isfinite(d) THEN d END AS d) FROM pair('train', 'rollout'))
    WINDOW sequence AS (PARTITION BY run, step, seq_id, iteration_a, iteration_b ORDER BY position)
)
GROUP BY run
HAVING count(d) > 0
ORDER BY run;
