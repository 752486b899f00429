-- Growth rate of the mismatch: slope of ln k3 against the step, one row per run.
-- Unit: slope in 1 / step; doubling in steps.
-- Source: arXiv 2510.18855 (IcePop): under its assumptions the mismatch grows by a constant factor per step.
-- Meaning: growth is the factor per step minus 1. Not meaningful for a few steps; compare the last third with the whole run,
--   since a collapse starts late.
SELECT run,
       count(*) AS num_steps,
       regr_slope(ln(k3), step) AS slope,
       exp(regr_slope(ln(k3), step)) - 1 AS growth,
       ln(2) / nullif(regr_slope(ln(k3), step), 0) AS doubling,
       regr_r2(ln(k3), step) AS r2,
       regr_slope(ln(k3), step) FILTER (place > 2 * n / 3) AS slope_of_last_third
FROM (
    SELECT run, step, k3, row_number() OVER (PARTITION BY run ORDER BY step) AS place, count(*) OVER (PARTITION BY run) AS n
    FROM pair_steps('train', 'rollout')
    WHERE k3 > 0 AND isfinite(k3)
)
GROUP BY run
ORDER BY run;
