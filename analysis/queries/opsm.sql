-- Sequences that off-policy sequence masking would drop at four thresholds, one row per step.
-- Unit: shares of the sequences with an advantage.
-- Needs: advantages.
-- Source: DeepSeek-V3.2; slime, compute_opsm_mask: a negative advantage, and mean of logprob(old) - logprob(current)
--   over the sequence above delta (opsm_delta, 1e-4 by default).
-- Meaning: the published rule uses current:train; train:rollout shows what would be dropped due to the mismatch alone.
SELECT run, step, count(*) AS num_sequences, avg((advantage < 0)::INTEGER) AS share_negative,
       avg((advantage < 0 AND drift > 1e-4)::INTEGER) AS dropped_at_0_0001,
       avg((advantage < 0 AND drift > 1e-3)::INTEGER) AS dropped_at_0_001,
       avg((advantage < 0 AND drift > 1e-2)::INTEGER) AS dropped_at_0_01,
       avg((advantage < 0 AND drift > 1e-1)::INTEGER) AS dropped_at_0_1
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b, avg(advantage) AS advantage, avg(-d) AS drift
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d) AND advantage IS NOT NULL
    GROUP BY ALL
)
GROUP BY run, step
ORDER BY run, step;
