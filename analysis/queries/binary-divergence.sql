-- Total variation and KL of the binary distribution "this token or any other", from sampled tokens, one row per step.
-- Unit: tv is dimensionless; kl(rollout || trainer) in nats.
-- Source: arXiv 2602.04879: TV = |p - q|; KL = p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)) with p of the rollout.
-- Meaning: lower bounds on the divergences of the full distributions, with all other tokens merged into one.
SELECT run, step,
       count(*) AS num_tokens,
       avg(abs(p - q)) AS mean_tv,
       max(abs(p - q)) AS max_tv,
       avg(kl) AS mean_kl,
       max(kl) AS max_kl
FROM (
    SELECT run, step, p, q,
           greatest(-p * d + CASE WHEN p < 1 AND q < 1 THEN (1 - p) * (ln(1 - p) - ln(1 - q)) ELSE 0 END, 0.0) AS kl
    FROM (
        SELECT run, step, d, exp(logprob_b::DOUBLE) AS p, exp(logprob_a::DOUBLE) AS q
        FROM pair('train', 'rollout')
        WHERE mask AND isfinite(d)
    )
)
GROUP BY run, step
ORDER BY run, step;
