-- The 50 tokens that lie furthest apart.
-- Unit: nats; p is a probability.
-- Source: none; it is where to look first.
-- Meaning: take step, seq_id and position to tim-trace replay and see which arm moves them.
SELECT run, step, seq_id, iteration_a, position, token_id, logprob_a, logprob_b, d, exp(logprob_b) AS p_b, advantage
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
ORDER BY abs(d) DESC, run, step, seq_id, iteration_a, position
LIMIT 50;
