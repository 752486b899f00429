-- How far the passes lie apart by the entropy of the distribution that the token was drawn from, a row a quarter of a nat.
-- Unit: nats; share_of_k3 has none.
-- Needs: the entropy of either pass, or of the pass current.
-- Source: IcePop (masked tokens have higher entropy); richardli.xyz/rl-collapse.
-- Meaning: a gap that grows with the entropy comes from uncertain tokens, as rounding does; one at low entropy is not
--   rounding: look for wrong rows, routing flips or another distribution.
SELECT run,
       floor(entropy * 4) / 4 AS entropy_from,
       count(*) AS num_tokens,
       avg(d) AS mean_d,
       avg(abs(d)) AS mean_abs_d,
       sqrt(avg(d * d)) AS rms_d,
       max(abs(d)) AS max_abs_d,
       sum(expm1_minus(d)) / sum(sum(expm1_minus(d))) OVER (PARTITION BY run) AS share_of_k3
FROM pair_entropies('train', 'rollout')
WHERE mask AND isfinite(d) AND isfinite(entropy)
GROUP BY run, entropy_from
ORDER BY run, entropy_from;
