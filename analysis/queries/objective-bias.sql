-- What the mismatch does to PPO's clipped objective, a row a step and inner iteration.
-- Unit: the advantage's; shares of the tokens that have an advantage.
-- Needs: the pass current, advantages.
-- Source: arXiv 2605.14220: a loss that divides by the trainer's logprobs uses rho = rho* exp(-d), rho* = current / rollout.
--   b = f(rho) - f(rho*) with f = min(rho A, clip(rho, 0.8, 1.2) A).
-- Meaning: skew = sum b / sum |b|: near 0 the mismatch is noise, near -1 or 1 it pushes one way. flipped_*: tokens that are
--   clipped under one ratio and not under the other. Clip bounds of 0.2 are assumed: print the query to set your own.
SELECT run, step, iteration,
       count(*) AS num_tokens,
       avg(b) AS mean_bias,
       sum(b) FILTER (advantage > 0) / count(*) AS mean_bias_positive,
       sum(b) FILTER (advantage < 0) / count(*) AS mean_bias_negative,
       avg(abs(b)) AS mean_abs_bias,
       sum(b) / nullif(sum(abs(b)), 0) AS skew,
       avg((is_clipped AND NOT is_clipped_exact)::INTEGER) AS flipped_to_clipped,
       avg((is_clipped_exact AND NOT is_clipped)::INTEGER) AS flipped_to_free
FROM (
    SELECT *,
           least(used * advantage, greatest(least(used, 1.2), 0.8) * advantage)
               - least(exact * advantage, greatest(least(exact, 1.2), 0.8) * advantage) AS b,
           (advantage > 0 AND used > 1.2) OR (advantage < 0 AND used < 0.8) AS is_clipped,
           (advantage > 0 AND exact > 1.2) OR (advantage < 0 AND exact < 0.8) AS is_clipped_exact
    FROM (
        SELECT run, step, iteration, advantage, exp(stale) AS used, exp(d + stale) AS exact
        FROM pair_current('train', 'rollout')
        WHERE mask AND isfinite(d) AND isfinite(stale) AND advantage IS NOT NULL
    )
)
GROUP BY run, step, iteration
ORDER BY run, step, iteration;
