-- Bound on the gradient's bias that grows with length squared, from captured distributions, one row per step.
-- Unit: multiples of B R, with B the largest norm of a token's gradient of its logprob and R the largest return.
-- Needs: distributions that both passes captured (record or replay with --capture).
-- Source: arXiv 2602.01826, theorem 3.1: |bias| <= 2 B Delta_max T^2; from steps of its proof, B Delta_max T (T + 1);
--   plug_in = 2 sum_t (D_t + sum_{s<t} D_s) with D_t the mean total variation at position t.
-- Meaning: as t2-bound, with total variations of full distributions; with only the top K captured, their upper bounds.
SELECT run, step,
       max(place) AS longest,
       max(delta_max) AS delta_max,
       2 * max(delta_max) * max(place) ** 2 AS t2_bound,
       max(delta_max) * max(place) * (max(place) + 1) AS tight_bound,
       2 * sum(mean_tv * (last - place + 1)) AS plug_in
FROM (
    SELECT *, max(place) OVER (PARTITION BY run, step) AS last
    FROM (
        SELECT run, step, position + 1 AS place, avg(coalesce(tv, tv_high)) AS mean_tv, max(coalesce(tv, tv_high)) AS delta_max
        FROM pair_distributions('train', 'rollout')
        WHERE mask
        GROUP BY ALL
    )
)
GROUP BY run, step
ORDER BY run, step;
