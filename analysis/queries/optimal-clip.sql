-- The clip of a truncated sequence ratio that has the least bound on its mean squared error, a row a step.
-- Unit: none (a ratio).
-- Source: richardli.xyz/rl-collapse: C = sqrt(2 (1 + chi2)), where 1 + chi2 is the mean of the squared sequence ratio.
-- Meaning: it rises with the spread of the ratios; a clip in use that lies far below cuts more than it saves.
SELECT run, step,
       num_sequences,
       chi2_sequence,
       sqrt(2 * (1 + chi2_sequence)) AS optimal_clip
FROM pair_steps('train', 'rollout')
ORDER BY run, step;
