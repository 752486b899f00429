-- How many responses of a prompt differ, and from which token on, a row a step.
-- Unit: shares; tokens.
-- Needs: groups.
-- Source: thinkingmachines.ai, Defeating Nondeterminism in LLM Inference (1,000 samples at temperature 0 that should be one).
-- Meaning: at temperature 0 more than one response says that the engine's numbers depend on its batches; in training, groups
--   of one response teach nothing. It needs no second pass and is the same for every pair.
SELECT run, step,
       count(*) AS num_groups,
       avg(num_unique / num_responses) AS mean_share_unique,
       avg((num_unique = 1)::INTEGER) AS share_of_groups_alike,
       avg(shared) FILTER (num_unique > 1) AS mean_shared_tokens
FROM (
    -- What all lists of a group begin with is what the first and the last of them in order begin with.
    SELECT *, coalesce(list_min(list_filter(range(1, least(len(lowest), len(highest)) + 1),
                                            lambda place: lowest[place] <> highest[place])) - 1,
                       least(len(lowest), len(highest))) AS shared
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
