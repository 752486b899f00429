-- Number of distinct responses per prompt, and the first token at which they differ, one row per step.
-- Unit: shares; tokens.
-- Needs: groups.
-- Source: thinkingmachines.ai, Defeating Nondeterminism in LLM Inference (1,000 samples at temperature 0, not all
--   identical).
-- Meaning: at temperature 0, more than one response means that the engine's results depend on batching; in training,
--   groups with a single distinct response give no gradient. This query needs no second pass and gives the same result
--   for every pair.
SELECT run, step, count(*) AS num_groups, avg(num_unique / num_responses) AS mean_share_unique,
       avg((num_unique = 1)::INTEGER) AS share_of_groups_alike,
       avg(shared) FILTER (num_unique > 1) AS mean_shared_tokens
FROM (
    -- The common prefix of the smallest and the largest list is common to all lists of the group.
    SELECT *, common_prefix(lowest, highest) AS shared
    FROM (
        SELECT run, step, group_id, count(*) AS num_responses, count(DISTINCT response_ids) AS num_unique,
               min(response_ids) AS lowest, max(response_ids) AS highest
        FROM sequences
        WHERE group_id IS NOT NULL
        GROUP BY run, step, group_id
        HAVING count(*) > 1
    )
)
GROUP BY run, step
ORDER BY run, step;
