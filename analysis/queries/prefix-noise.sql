-- Noise in each pass: differences between two logprobs for the same token after the same prefix, one row per step.
-- Unit: nats; noisy_a and noisy_b are shares of the compared tokens.
-- Needs: responses to the same prompt in one step that begin with the same tokens.
-- Source: thinkingmachines.ai, Defeating Nondeterminism in LLM Inference.
-- Meaning: if only one side has differences above 1e-3, that side is not deterministic, or its rows were computed
--   differently. If neither side has noise but d is large, weights or context differ. In bfloat16, batching alone gives
--   an rms of about 1e-2.
SELECT run, step, count(*) AS num_compared, avg((abs(logprob_a - other_a) > 1e-3)::INTEGER) AS noisy_a,
       avg((abs(logprob_b - other_b) > 1e-3)::INTEGER) AS noisy_b, sqrt(avg((logprob_a - other_a) ** 2)) AS rms_a,
       sqrt(avg((logprob_b - other_b) ** 2)) AS rms_b, max(abs(logprob_a - other_a)) AS max_a,
       max(abs(logprob_b - other_b)) AS max_b
FROM pair_neighbours('train', 'rollout')
WHERE position < shared
GROUP BY run, step
ORDER BY run, step;
