-- Bounds on the error of a trust region's surrogate objective, from sampled tokens, one row per step.
-- Unit: returns in [0, 1]; delta and kl_sequence in nats, eps and tv_sequence total variations.
-- Source: arXiv 2512.23075: 2 T (T - 1) eps^2 (classical) and the paper's Pinsker, mixed, coupling and adaptive bounds; the
--   _kl ones use sqrt(KL / 2) instead of total variations. Per token: |p - q| and the KL of "this token or any other"; per
--   sequence: mean sum of k3 and half of mean |exp(sum d) - 1|; per position: half of mean |exp(d) - 1|.
-- Meaning: estimates, since sampled maxima are below the true ones: read them as orders of magnitude and compare steps.
--   is_vacuous: the bound exceeds 1 and is meaningless. trust-region-captured has the true eps and delta.
SELECT run, step, longest, eps, delta, kl_sequence, tv_sequence,
       bound_classical(longest, eps) AS classical,
       bound_pinsker(longest, pinsker(delta), delta) AS pinsker_kl,
       bound_pinsker(longest, eps, delta) AS pinsker_tv,
       bound_mixed(longest, pinsker(delta), pinsker(kl_sequence)) AS mixed_kl,
       bound_mixed(longest, eps, tv_sequence) AS mixed_tv,
       bound_coupling(longest, eps) AS coupling,
       adaptive,
       least(classical, pinsker_kl, pinsker_tv, mixed_kl, mixed_tv, coupling, adaptive) AS smallest,
       CASE smallest WHEN adaptive THEN 'adaptive' WHEN mixed_tv THEN 'mixed_tv' WHEN mixed_kl THEN 'mixed_kl'
                     WHEN pinsker_tv THEN 'pinsker_tv' WHEN pinsker_kl THEN 'pinsker_kl'
                     WHEN coupling THEN 'coupling' ELSE 'classical' END AS binding,
       smallest > 1 AS is_vacuous
FROM (
    SELECT run, step, any_value(longest) AS longest, any_value(eps) AS eps, any_value(delta) AS delta,
           any_value(kl_sequence) AS kl_sequence, any_value(tv_sequence) AS tv_sequence,
           sum(bound_adaptive_term(longest, place, mean_tv, eps, delta)) AS adaptive
    FROM (
        SELECT run, step, place, mean_tv,
               max(place) OVER (PARTITION BY run, step) AS longest,
               max(max_tv) OVER (PARTITION BY run, step) AS eps,
               max(max_kl) OVER (PARTITION BY run, step) AS delta
        FROM (
            SELECT run, step, position + 1 AS place, avg(abs(expm1(d))) / 2 AS mean_tv, max(abs(p - q)) AS max_tv,
                   max(greatest(-p * d + CASE WHEN p < 1 AND q < 1 THEN (1 - p) * (ln(1 - p) - ln(1 - q)) ELSE 0 END, 0.0))
                       AS max_kl
            FROM (SELECT *, exp(logprob_b::DOUBLE) AS p, exp(logprob_a::DOUBLE) AS q FROM pair('train', 'rollout'))
            WHERE mask AND isfinite(d)
            GROUP BY ALL
        )
    )
    JOIN (
        SELECT run, step, avg(sum_k3) AS kl_sequence, avg(least(abs(expm1(sum_d)) / 2, 1)) AS tv_sequence
        FROM (
            SELECT run, step, seq_id, iteration_a, iteration_b, sum(d) AS sum_d, sum(expm1_minus(d)) AS sum_k3
            FROM pair('train', 'rollout')
            WHERE mask AND isfinite(d)
            GROUP BY ALL
        )
        GROUP BY run, step
    ) USING (run, step)
    GROUP BY run, step
)
ORDER BY run, step;
