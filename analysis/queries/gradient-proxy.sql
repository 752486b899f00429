-- How the mismatch weighs whole sequences against each other: the mean of (exp(sum d) - 1) A, a row a step.
-- Unit: the advantage's.
-- Needs: advantages.
-- Source: arXiv 2605.14220, of REINFORCE: the gradient is off by -E_b[(exp(sum d) - 1) A grad log p].
-- Meaning: with every gradient alike this is the bias of an update; mean_abs is what it would be if no two cancelled.
SELECT run, step,
       count(*) AS num_sequences,
       avg(expm1(sum_d) * advantage) AS mean_bias,
       avg(abs(expm1(sum_d) * advantage)) AS mean_abs,
       avg(abs(advantage)) AS mean_abs_advantage
FROM (
    SELECT run, step, seq_id, iteration_a, iteration_b, sum(d) AS sum_d, avg(advantage) AS advantage
    FROM pair('train', 'rollout')
    WHERE mask AND isfinite(d) AND advantage IS NOT NULL
    GROUP BY ALL
)
GROUP BY run, step
ORDER BY run, step;
