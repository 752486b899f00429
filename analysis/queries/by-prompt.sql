-- The prompts (groups) that carry most of the gap, the 50 largest.
-- Unit: nats; share_of_k3 has none.
-- Source: research on which data a mismatch comes from: richardli.xyz/rl-collapse.
-- Meaning: one prompt far above its share says that something is wrong with its text or its rows.
SELECT run, step, group_id,
       count(DISTINCT seq_id) AS num_sequences,
       count(*) AS num_tokens,
       avg(d) AS mean_d,
       avg(abs(d)) AS mean_abs_d,
       max(abs(d)) AS max_abs_d,
       sum(expm1_minus(d)) / sum(sum(expm1_minus(d))) OVER (PARTITION BY run) AS share_of_k3
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, step, group_id
ORDER BY share_of_k3 DESC, run, step, group_id
LIMIT 50;
