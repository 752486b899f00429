-- The 50 tokens with the largest |d|.
-- Unit: nats; p is a probability.
-- Source: none; a starting point.
-- Meaning: replay these tokens' steps (tim-trace replay) to see which arm changes their d.
SELECT run, step, seq_id, iteration_a, position, token_id, logprob_a, logprob_b, d, exp(logprob_b) AS p_b, advantage
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
ORDER BY abs(d) DESC, run, step, seq_id, iteration_a, position
LIMIT 50;
