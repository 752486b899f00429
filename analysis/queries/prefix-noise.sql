-- Noise in each pass: differences between two logprobs for the same token after the same prefix, one row per step.
-- Unit: nats; noisy_a and noisy_b are shares of the compared tokens.
-- Needs: responses to the same prompt in one step that begin with the same tokens.
-- Source: thinkingmachines.ai, Defeating Nondeterminism in LLM Inference.
-- Meaning: if only one side has differences above 1e-3, that side is not deterministic, or its rows were computed
--   differently. If neither side has noise but d is large, weights or context differ. In bfloat16, batching alone gives
--   an rms of about 1e-2.
WITH neighbours AS (
    SELECT run, step, seq_id, before,
           -- Sorted responses share their longest prefix with a neighbour.
           coalesce(list_min(list_filter(range(1, least(len(response_ids), len(other)) + 1),
                                         lambda place: response_ids[place] <> other[place])) - 1,
                    least(len(response_ids), len(other))) AS shared
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
SELECT run, step, count(*) AS num_compared, avg((abs(one.a - two.a) > 1e-3)::INTEGER) AS noisy_a,
       avg((abs(one.b - two.b) > 1e-3)::INTEGER) AS noisy_b, sqrt(avg((one.a - two.a) ** 2)) AS rms_a,
       sqrt(avg((one.b - two.b) ** 2)) AS rms_b, max(abs(one.a - two.a)) AS max_a,
       max(abs(one.b - two.b)) AS max_b
FROM neighbours
JOIN counted AS one USING (run, step, seq_id)
JOIN counted AS two ON two.run = one.run AND two.step = one.step AND two.seq_id = neighbours.before
     AND two.position = one.position AND two.iteration_a = one.iteration_a AND two.iteration_b = one.iteration_b
WHERE one.position < neighbours.shared
GROUP BY run, step
ORDER BY run, step;
