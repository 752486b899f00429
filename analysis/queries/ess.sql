-- Effective sample size of the importance weights exp(d), by token and by sequence, a row a step.
-- Unit: shares of the tokens or sequences.
-- Source: Kong 1992: (sum w)^2 / (n sum w^2).
-- Meaning: 0.5 says that half of the batch is as good as lost when it is weighted by exp(d).
SELECT run, step, num_sequences, num_tokens, ess_token, ess_sequence
FROM pair_steps('train', 'rollout')
ORDER BY run, step;
