-- Sums and quantiles of a range of steps of one run; the view computed_sums has its sums.
INSERT INTO computed_sequence_sums
    SELECT run, {a}, {b}, {sum_columns}
    FROM computed_sums;

INSERT INTO computed_step_quantiles
    SELECT {run}, {a}, {b}, step, num_tokens, cuts[1], cuts[2], cuts[3]
    FROM (
        SELECT step, count(*) AS num_tokens, quantile_cont(abs(d), [0.5, 0.95, 0.99]) AS cuts
        FROM pair_tokens({a}, {b}, {run}, {first_step}, {last_step})
        WHERE d IS NOT NULL
        GROUP BY step
    );
