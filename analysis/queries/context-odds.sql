-- Log-odds of two tokens in one context under each pass: correlation, and slope of a on b, one row per step.
-- Unit: slope is dimensionless; residual in nats.
-- Needs: responses of one step to one prompt that continue a common prefix with different tokens.
-- Source: a temperature divides all logits of a context: ln p_a(i) - ln p_a(j) = T_b / T_a (ln p_b(i) - ln p_b(j)).
-- Meaning: a temperature on one side gives a correlation of 1, a slope of T_b / T_a, and a residual near 0; different
--   weights give a correlation well below 1. A slope of 1 with a small residual means that the normaliser causes the
--   mismatch, as with truncation.
WITH neighbours AS (
    SELECT run, step, seq_id, before,
           list_min(list_filter(range(1, least(len(response_ids), len(other)) + 1),
                                lambda place: response_ids[place] <> other[place])) - 1 AS shared
    FROM (
        SELECT run, step, seq_id, response_ids, lag(seq_id) OVER response AS before, lag(response_ids) OVER response AS other
        FROM sequences
        WHERE prompt_ids IS NOT NULL
        WINDOW response AS (PARTITION BY run, step, prompt_ids ORDER BY response_ids, seq_id)
    )
    WHERE before IS NOT NULL
), counted AS (
    SELECT run, step, seq_id, iteration_a, iteration_b, position, logprob_a::DOUBLE AS a, logprob_b::DOUBLE AS b
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
)
SELECT neighbours.run, neighbours.step, count(*) AS num_contexts, corr(one.a - two.a, one.b - two.b) AS corr,
       sum((one.a - two.a) * (one.b - two.b)) / nullif(sum((one.b - two.b) ** 2), 0) AS slope,
       sqrt(avg((one.a - two.a - one.b + two.b) ** 2)) AS rms_difference
FROM neighbours
JOIN counted AS one ON one.run = neighbours.run AND one.step = neighbours.step AND one.seq_id = neighbours.seq_id
     AND one.position = neighbours.shared
JOIN counted AS two ON two.run = one.run AND two.step = one.step AND two.seq_id = neighbours.before
     AND two.position = one.position AND two.iteration_a = one.iteration_a AND two.iteration_b = one.iteration_b
GROUP BY neighbours.run, neighbours.step
ORDER BY neighbours.run, neighbours.step;
