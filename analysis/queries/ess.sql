-- Effective sample size of the importance weights exp(d), by token and by sequence, one row per step.
-- Unit: shares of the tokens or sequences.
-- Source: Kong 1992: (sum w)^2 / (n sum w^2).
-- Meaning: at 0.5, weighting by exp(d) is as costly as losing half of the batch.
SELECT run, step, num_sequences, num_tokens, ess_token, ess_sequence
FROM pair_steps('train', 'rollout')
ORDER BY run, step;
