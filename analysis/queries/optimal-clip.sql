-- The clip of a truncated sequence ratio that minimizes the bound on its mean squared error, one row per step.
-- Unit: none (a ratio).
-- Source: richardli.xyz/rl-collapse: C = sqrt(2 (1 + chi2)), where 1 + chi2 is the mean of the squared sequence ratio.
-- Meaning: it rises with the spread of the ratios; a clip far below it adds more bias than it saves variance.
SELECT run, step,
       num_sequences,
       chi2_sequence,
       sqrt(2 * (1 + chi2_sequence)) AS optimal_clip
FROM pair_steps('train', 'rollout')
ORDER BY run, step;
