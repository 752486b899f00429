-- Mismatch by the token's probability under the rollout, one row per decade.
-- Unit: nats; share_of_k3 is a share.
-- Source: arXiv 2512.23087 (|d| is bounded by twice the logit noise times 1 - p); richardli.xyz/rl-collapse.
-- Meaning: rounding of logits changes improbable tokens most and certain ones least. A mismatch as large above 0.9 as below
--   0.01 is not rounding: look for temperature, stale weights or wrong rows.
SELECT run, greatest(floor(log10(exp(logprob_b))), -12)::INTEGER AS decade, count(*) AS num_tokens,
       avg(d) AS mean_d, avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d, max(abs(d)) AS max_abs_d,
       sum(expm1_minus(d)) / sum(sum(expm1_minus(d))) OVER (PARTITION BY run) AS share_of_k3
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, decade
ORDER BY run, decade;
