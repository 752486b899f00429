-- Bias of the sequence weights: the mean of (exp(sum d) - 1) A, one row per step.
-- Unit: that of the advantage.
-- Needs: advantages.
-- Source: arXiv 2605.14220, for REINFORCE: the error of the gradient is -E_b[(exp(sum d) - 1) A grad log p].
-- Meaning: if all gradients were equal, this would be the bias of an update; mean_abs is the bias without cancellation.
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
