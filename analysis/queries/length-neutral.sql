-- Two length-neutral statistics of responses, and the share of responses beyond their bounds, one row per step.
-- Unit: mean |exp(d) - 1|, plain (ser) and weighted; shares of the sequences.
-- Source: arXiv 2512.23075: SER = mean |rho_t - 1|; LN-TRM = sum |rho_t - 1| w_t / sum w_t with w_t = min(1, (T - t) eps,
--   sqrt((T - t) delta / 2)), T the longest response of the step, eps and delta as in trust-region; bounds of 0.03 to 0.1.
-- Meaning: the weights emphasize early tokens, whose error reaches further. Unlike a bound on the worst token, these bounds do
--   not drop responses for being long.
SELECT run, step,
       count(*) AS num_sequences,
       avg(ser) AS mean_ser,
       max(ser) AS max_ser,
       avg(weighted) AS mean_weighted,
       max(weighted) AS max_weighted,
       avg((ser <= 0.03)::INTEGER) AS kept_by_ser_0_03,
       avg((ser <= 0.1)::INTEGER) AS kept_by_ser_0_1,
       avg((weighted <= 0.03)::INTEGER) AS kept_by_weighted_0_03,
       avg((weighted <= 0.1)::INTEGER) AS kept_by_weighted_0_1
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b,
           avg(off) AS ser,
           sum(off * least(1, (longest - place) * eps, sqrt((longest - place) * delta / 2)))
               / nullif(sum(least(1, (longest - place) * eps, sqrt((longest - place) * delta / 2))), 0) AS weighted
    FROM (
        SELECT *, max(place) OVER step AS longest, max(tv) OVER step AS eps, max(kl) OVER step AS delta
        FROM (
            SELECT run, step, seq_id, iteration_a, iteration_b, position + 1 AS place, abs(expm1(d)) AS off, abs(p - q) AS tv,
                   greatest(-p * d + CASE WHEN p < 1 AND q < 1 THEN (1 - p) * (ln(1 - p) - ln(1 - q)) ELSE 0 END, 0.0) AS kl
            FROM (SELECT *, exp(logprob_b::DOUBLE) AS p, exp(logprob_a::DOUBLE) AS q FROM pair('train', 'rollout'))
            WHERE mask AND isfinite(d)
        )
        WINDOW step AS (PARTITION BY run, step)
    )
    GROUP BY run, step, seq_id, iteration_a, iteration_b
)
GROUP BY run, step
ORDER BY run, step;
