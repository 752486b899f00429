-- The 50 prompts (groups) with the largest share of the mismatch.
-- Unit: nats; share_of_k3 is a share.
-- Source: mismatch by data source: richardli.xyz/rl-collapse.
-- Meaning: a prompt far above its expected share has a problem in its text or rows.
SELECT run, step, group_id, count(DISTINCT seq_id) AS num_sequences, count(*) AS num_tokens, avg(d) AS mean_d,
       avg(abs(d)) AS mean_abs_d, max(abs(d)) AS max_abs_d,
       sum(expm1_minus(d)) / sum(sum(expm1_minus(d))) OVER (PARTITION BY run) AS share_of_k3
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, step, group_id
ORDER BY share_of_k3 DESC, run, step, group_id
LIMIT 50;
