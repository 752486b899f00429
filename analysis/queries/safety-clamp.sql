-- Share of tokens and sequences that reach verl's clamp of 20 nats, one row per step.
-- Unit: shares.
-- Source: verl, SAFETY_BOUND = 20 on d and on the sum of d.
-- Meaning: saturated sequences have a ratio of e^20 or e^-20 whatever their d, so their sequence-level statistics are
--   meaningless.
SELECT run, step,
       count(*) AS num_sequences,
       sum(num_clamped) / sum(num_tokens) AS share_tokens,
       avg((abs(sum_d) >= 20)::INTEGER) AS share_sequences,
       max(abs(sum_d)) AS max_abs_sum_d
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b,
           count(*) AS num_tokens, count(*) FILTER (abs(d) >= 20) AS num_clamped, sum(d) AS sum_d
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
    GROUP BY ALL
)
GROUP BY run, step
ORDER BY run, step;
