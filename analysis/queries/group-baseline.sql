-- Baseline of the advantages: the formula that computes them from the rewards of a group, one row per step.
-- Unit: rms of advantage minus candidate, in the advantage's unit; correlations.
-- Needs: advantages, rewards and groups of at least two.
-- Source: GRPO, (reward - mean) / (std + 1e-4) over a group (arXiv 2402.03300), or without std (arXiv 2503.20783).
-- Meaning: the candidate with an error near 0 is the formula that the run uses; a fault begins at the first step at which
--   its error is large. If error_previous or error_next is near 0, the baseline is that of the neighbouring group in
--   recording order. A low corr_in_group means that rewards were assigned to the wrong rows, and a large rms_group_mean
--   that the baseline covers more than the group. If no error is near 0, the run uses a different formula.
WITH grouped AS (
    SELECT run, step, group_id, advantage AS given, reward,
           min(row(len(seq_id), seq_id)) OVER of_group AS first_id,  -- recording order: 9 comes before 10
           count(*) OVER of_group AS num_rows,
           avg(reward) OVER of_group AS mean,
           stddev_samp(reward) OVER of_group AS std,
           stddev_pop(reward) OVER of_group AS std_pop,
           avg(advantage) OVER of_group AS mean_given,
           avg(reward) OVER (PARTITION BY run, step) AS step_mean,
           stddev_samp(reward) OVER (PARTITION BY run, step) AS step_std
    FROM (
        SELECT run, step, seq_id, group_id, reward, coalesce(advantage, list_avg(advantages)) AS advantage
        FROM sequences
        WHERE group_id IS NOT NULL
    )
    WHERE isfinite(reward) AND isfinite(advantage)
    WINDOW of_group AS (PARTITION BY run, step, group_id)
), means AS (
    SELECT run, step, group_id, lag(mean) OVER in_step AS previous, lead(mean) OVER in_step AS next
    FROM (SELECT DISTINCT run, step, group_id, first_id, mean FROM grouped)
    WINDOW in_step AS (PARTITION BY run, step ORDER BY first_id)
)
SELECT run, step, count(*) AS num_sequences, avg(num_rows) AS rows_per_group,
       corr(reward - mean, given) AS corr_in_group, sqrt(avg(mean_given ** 2)) AS rms_group_mean,
       sqrt(avg((given - (reward - mean) / (std + 1e-4)) ** 2)) AS error_std,
       sqrt(avg((given - (reward - mean) / (std_pop + 1e-4)) ** 2)) AS error_std_pop,
       sqrt(avg((given - (reward - mean)) ** 2)) AS error_mean,
       sqrt(avg((given - (reward - previous) / (std + 1e-4)) ** 2) FILTER (std > 0)) AS error_previous,
       sqrt(avg((given - (reward - next) / (std + 1e-4)) ** 2) FILTER (std > 0)) AS error_next,
       sqrt(avg((given - (reward - step_mean) / (step_std + 1e-4)) ** 2)) AS error_step
FROM grouped
JOIN means USING (run, step, group_id)
WHERE num_rows > 1
GROUP BY run, step
ORDER BY run, step;
