-- The run over time: reward, responses, advantages, versions, entropy, updates and mismatch, one row per step.
-- Unit: nats, tokens, updates; shares of the sequences; other columns as logged.
-- Source: none; read the rows before and at the onset of a collapse.
-- Meaning: start with the quantity that changes first. share_top_reward or share_top_response near 1 means that all
--   responses get the same reward or are identical; a growing lag means sampling from older weights.
SELECT pairs.run, pairs.step,
       s.num_sequences, s.mean_reward, s.share_top_reward, s.share_top_response, s.mean_length, s.max_abs_advantage, versions.lag,
       metrics.grad_norm, metrics.learning_rate, metrics.loss, pairs.mean_a, pairs.mean_abs_d, pairs.max_abs_d
FROM (
    SELECT run, step, avg(logprob_a) AS mean_a, avg(abs(d)) AS mean_abs_d, max(abs(d)) AS max_abs_d
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
    GROUP BY run, step
) AS pairs
JOIN (
    SELECT run, step, count(*) AS num_sequences, avg(reward) AS mean_reward,
           avg((reward = top_reward)::INTEGER) AS share_top_reward,
           max(num_same) / count(*) AS share_top_response, avg(num_response_tokens) AS mean_length,
           max(coalesce(abs(advantage), list_max(list_transform(advantages, lambda value: abs(value))))) AS max_abs_advantage
    FROM (
        SELECT *, max(reward) OVER (PARTITION BY run) AS top_reward,
               count(*) OVER (PARTITION BY run, step, response_ids) AS num_same
        FROM sequences
    )
    GROUP BY run, step
) AS s USING (run, step)
LEFT JOIN (
    SELECT run, step, avg(scores.policy_version - sequences.policy_version) AS lag
    FROM scores JOIN sequences USING (run, step, seq_id)
    WHERE "pass" = 'train'
    GROUP BY run, step
) AS versions USING (run, step)
LEFT JOIN (
    SELECT run, step, avg(value) FILTER (name LIKE '%grad_norm') AS grad_norm,
           avg(value) FILTER (name LIKE '%learning_rate' OR name LIKE '%/lr' OR name = 'lr') AS learning_rate,
           avg(value) FILTER (name LIKE '%loss') AS loss
    FROM metrics
    WHERE name NOT LIKE 'hyperparameter/%' AND name NOT LIKE '%eval%'
    GROUP BY run, step
) AS metrics USING (run, step)
ORDER BY pairs.run, pairs.step;
