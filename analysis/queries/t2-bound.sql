-- Bound on the gradient's bias that grows with length squared, from sampled tokens, one row per step.
-- Unit: multiples of B R, with B the largest norm of a token's gradient of its logprob and R the largest return.
-- Source: arXiv 2602.01826, theorem 3.1: |bias| <= 2 B Delta_max T^2; from steps of its proof, B Delta_max T (T + 1);
--   plug_in = 2 sum_t (D_t + sum_{s<t} D_s) with D_t the mean total variation at position t, here half of mean |exp(d) - 1|.
-- Meaning: delta_max is the largest |p - q| of a sampled token, a lower bound on the true one. The bounds are very loose;
--   compare steps with each other and with plug_in to see the effect of a surge in length.
SELECT run, step,
       max(place) AS longest,
       max(delta_max) AS delta_max,
       2 * max(delta_max) * max(place) ** 2 AS t2_bound,
       max(delta_max) * max(place) * (max(place) + 1) AS tight_bound,
       2 * sum(mean_tv * (last - place + 1)) AS plug_in
FROM (
    SELECT *, max(place) OVER (PARTITION BY run, step) AS last
    FROM (
        SELECT run, step, position + 1 AS place, avg(abs(expm1(d))) / 2 AS mean_tv,
               max(abs(exp(logprob_a::DOUBLE) - exp(logprob_b::DOUBLE))) AS delta_max
        FROM pair('train', 'rollout')
        WHERE mask AND isfinite(d)
        GROUP BY ALL
    )
)
GROUP BY run, step
ORDER BY run, step;
