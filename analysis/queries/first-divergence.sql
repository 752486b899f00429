-- First token of a response with |d| above each of three bounds, one row per step.
-- Unit: shares of the sequences; positions in the response, from 0.
-- Source: OpenReview QDOKyg7a5e (first divergence), with a bound on |d| instead of a different token, since both passes
--   score the same tokens.
-- Meaning: positions near 0 mean that the mismatch is everywhere. A common later position shows where it starts: at a
--   cache block, a window or a turn.
SELECT run, step, count(*) AS num_sequences, avg((first_0_01 IS NOT NULL)::INTEGER) AS share_0_01,
       median(first_0_01) AS median_first_0_01, avg((first_0_1 IS NOT NULL)::INTEGER) AS share_0_1,
       median(first_0_1) AS median_first_0_1, avg((first_1 IS NOT NULL)::INTEGER) AS share_1,
       median(first_1) AS median_first_1
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b, min(position) FILTER (abs(d) > 0.01) AS first_0_01,
           min(position) FILTER (abs(d) > 0.1) AS first_0_1, min(position) FILTER (abs(d) > 1) AS first_1
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
    GROUP BY ALL
)
GROUP BY run, step
ORDER BY run, step;
