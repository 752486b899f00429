-- Tokens pushed down although their probability already dropped by 0.5 or more, one row per step.
-- Unit: share of the tokens with an advantage.
-- Needs: advantages.
-- Source: arXiv 2602.04879 (bad updates: a negative advantage, and p of the rollout at least 0.5 above the trainer's; at
--   most 0.5% of updates, and masking them alone stabilises a run).
-- Meaning: current:rollout shows the effect of an update, train:rollout the effect of the mismatch alone.
SELECT run, step, count(*) AS num_tokens,
       count(*) FILTER (advantage < 0 AND exp(logprob_b) - exp(logprob_a) >= 0.5) AS num_bad,
       count(*) FILTER (advantage < 0 AND exp(logprob_b) - exp(logprob_a) >= 0.5) / count(*) AS share_bad
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d) AND advantage IS NOT NULL
GROUP BY run, step
ORDER BY run, step;
