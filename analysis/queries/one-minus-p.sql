-- The logit noise that would explain the mismatch: |d| fitted to 2 noise (1 - p), one row per step.
-- Unit: nats (of a logit).
-- Source: arXiv 2512.23087: logit errors of at most e change a logprob by at most 2 e (1 - p). The fit goes through the
--   origin: slope = sum |d| (1 - p) / sum (1 - p)^2, and the noise is half the slope; p is the rollout's.
-- Meaning: bfloat16 logits near 16 round by 0.06. A maximum far above the fitted noise means that some tokens differ for
--   reasons other than rounding.
SELECT run, step,
       count(*) AS num_tokens,
       sum(abs(d) * rest) / sum(rest * rest) / 2 AS fitted_noise,
       quantile_cont(abs(d) / (2 * rest), 0.5) FILTER (rest > 1e-6) AS p50_noise,
       quantile_cont(abs(d) / (2 * rest), 0.99) FILTER (rest > 1e-6) AS p99_noise,
       max(abs(d) / (2 * rest)) FILTER (rest > 1e-6) AS max_noise
FROM (
    SELECT run, step, d, -expm1(least(logprob_b::DOUBLE, 0.0)) AS rest
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d)
)
GROUP BY run, step
ORDER BY run, step;
