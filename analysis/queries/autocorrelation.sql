-- Autocorrelation of d along the response, one row per run.
-- Unit: correlations of d with d at a given lag in tokens, over pairs of unmasked tokens with finite d.
-- Source: a token's error reaches later tokens through the KV cache.
-- Meaning: rounding gives about 0; a large value means that a state (cache, position, weights) is wrong for several
--   consecutive tokens.
SELECT run, count(d) AS num_tokens, corr(d, after_1) AS lag_1, corr(d, after_2) AS lag_2,
       corr(d, after_8) AS lag_8, corr(d, after_32) AS lag_32
FROM (
    SELECT run, d, lead(d, 1) OVER sequence AS after_1, lead(d, 2) OVER sequence AS after_2,
           lead(d, 8) OVER sequence AS after_8, lead(d, 32) OVER sequence AS after_32
    -- One row per response position, so that a lag in rows is a lag in tokens.
    FROM (SELECT * REPLACE (CASE WHEN mask AND isfinite(d) THEN d END AS d) FROM pair('train', 'rollout'))
    WINDOW sequence AS (PARTITION BY run, step, seq_id, iteration_a, iteration_b ORDER BY position)
)
GROUP BY run
HAVING count(d) > 0
ORDER BY run;
