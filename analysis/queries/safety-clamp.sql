-- How many tokens and sequences reach verl's clamp of 20 nats, beyond which a ratio says nothing, a row a step.
-- Unit: shares.
-- Source: verl, SAFETY_BOUND = 20 on d and on the sum of d.
-- Meaning: sequences that saturate have a ratio of e^20 or e^-20 whatever they are; sequence-level statistics are void
--   there.
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
