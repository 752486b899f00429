-- Total variation, KL in both directions, Jensen-Shannon and argmax flips of captured distributions, one row per step.
-- Unit: kl and js in nats; tv and shares are dimensionless.
-- Needs: distributions that both passes captured (record or replay with --capture).
-- Source: arXiv 2512.23075 (exact TV and KL at every position); arXiv 2602.04879 (from the top K and the rest).
-- Meaning: exact values of the distances that sampled tokens only estimate. If only the top K were captured, the exact
--   columns are NULL and the bounds apply. kl_ab is KL(a || b).
SELECT * FROM pair_distribution_steps('train', 'rollout') ORDER BY run, step;
