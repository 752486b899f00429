-- Total variation and KL of "this token or another one", from the sampled token alone, a row a step.
-- Unit: tv has none; kl in nats, of the rollout from the trainer.
-- Source: arXiv 2602.04879: TV = |p - q|; KL = p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)) with p of the rollout.
-- Meaning: lower bounds of the divergences of the whole distributions, by merging all other tokens into one.
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
