-- Mismatch by turn; a turn is a stretch of unmasked response tokens between masked ones.
-- Unit: nats.
-- Source: richardli.xyz/rl-collapse: the mismatch is larger after the first tool turn.
-- Meaning: a mismatch that grows with the turn comes from tool output: its tokens, its mask, or its cached keys and
--   values.
SELECT run, turn, count(*) AS num_tokens, avg(d) AS mean_d, avg(abs(d)) AS mean_abs_d, max(abs(d)) AS max_abs_d,
       corr(expm1(logprob_a::DOUBLE), expm1(logprob_b::DOUBLE)) AS prob_pearson
FROM (
    SELECT *, sum((mask AND NOT before)::INTEGER) OVER sequence AS turn
    FROM (
        SELECT *, coalesce(lag(mask) OVER (PARTITION BY run, step, seq_id, iteration_a, iteration_b ORDER BY position),
                           false) AS before
        FROM pair('train', 'rollout')
    )
    WINDOW sequence AS (PARTITION BY run, step, seq_id, iteration_a, iteration_b ORDER BY position)
)
WHERE mask AND isfinite(d)
GROUP BY run, turn
ORDER BY run, turn;
