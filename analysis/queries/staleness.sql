-- Split of the loss's log ratio into mismatch and staleness, one row per step and inner iteration.
-- Unit: nats; variances in nats squared; shares.
-- Needs: the `current` pass.
-- Source: arXiv 2512.01374: ln(current / rollout) = ln(train / rollout) + ln(current / train) = d + stale.
-- Meaning: share_mismatch = mean d^2 / (mean d^2 + mean stale^2). A loss that divides by the trainer's own logprobs is
--   affected by stale only; one that divides by the rollout's logprobs, by the total.
SELECT run, step, iteration, count(*) AS num_tokens, avg(d) AS mean_d, avg(stale) AS mean_stale,
       avg(abs(d)) AS mean_abs_d, avg(abs(stale)) AS mean_abs_stale, var_pop(d) AS var_d,
       var_pop(stale) AS var_stale, covar_pop(d, stale) AS cov_d_stale, var_pop(d + stale) AS var_total,
       avg(d * d) / nullif(avg(d * d) + avg(stale * stale), 0) AS share_mismatch
FROM pair_current('train', 'rollout')
WHERE mask AND isfinite(d) AND isfinite(stale)
GROUP BY run, step, iteration
ORDER BY run, step, iteration;
