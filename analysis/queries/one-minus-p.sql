-- The noise of the logits that would explain the gap: |d| fitted to 2 noise (1 - p), a row a step.
-- Unit: nats (of a logit).
-- Source: arXiv 2512.23087: logits that are off by at most e move a logprob by at most 2 e (1 - p). The fit goes through
--   the origin: slope = sum |d| (1 - p) / sum (1 - p)^2, and the noise is half of it; p is the rollout's.
-- Meaning: bfloat16 logits near 16 round by 0.06. A largest noise far above the fitted one says that some tokens are off
--   for another reason than rounding.
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
