-- Mismatch by the entropy of the next-token distribution, one row per 0.25 nats.
-- Unit: nats; share_of_k3 is a share.
-- Needs: the entropy of either pass, or of the `current` pass.
-- Source: IcePop (masked tokens have higher entropy); richardli.xyz/rl-collapse.
-- Meaning: rounding gives a mismatch that grows with entropy. A mismatch at low entropy is not rounding: look for wrong
--   rows, routing flips or a different distribution.
SELECT run, floor(entropy * 4) / 4 AS entropy_from, count(*) AS num_tokens, avg(d) AS mean_d,
       avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d, max(abs(d)) AS max_abs_d,
       sum(expm1_minus(d)) / sum(sum(expm1_minus(d))) OVER (PARTITION BY run) AS share_of_k3
FROM pair_entropies('train', 'rollout')
WHERE mask AND isfinite(d) AND isfinite(entropy)
GROUP BY run, entropy_from
ORDER BY run, entropy_from;
