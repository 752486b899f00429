-- Total variation, KL both ways and Jensen-Shannon of the captured distributions, and argmax flips, a row a step.
-- Unit: tv and shares have none; kl and js in nats.
-- Needs: distributions that both passes captured (record or replay with --capture).
-- Source: arXiv 2512.23075 (exact TV and KL at every place); arXiv 2602.04879 (of the top K and the rest).
-- Meaning: what the sampled tokens only estimate. Where the top K alone are known the exact columns are NULL and the bounds
--   hold. kl_ab is of pass a from pass b.
SELECT * FROM pair_distribution_steps('train', 'rollout') ORDER BY run, step;
