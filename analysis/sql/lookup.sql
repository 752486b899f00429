-- Sums and quantiles of a pair: stored ones if they cover every sequence, otherwise computed here.
-- {covered} and {run_covered} list the pairs with stored sums; the condition is constant, so DuckDB drops the unused branch.

CREATE OR REPLACE MACRO is_covered(a, b) AS (a || ' ' || b) IN ({covered});
CREATE OR REPLACE MACRO is_run_covered(a, b) AS (a || ' ' || b) IN ({run_covered});

CREATE OR REPLACE MACRO pair_sums(a, b) AS TABLE
    SELECT {sum_columns}
    FROM sequence_sums
    WHERE pass_a = CASE WHEN is_covered(a, b) THEN a END AND pass_b = b
    UNION ALL
    SELECT {sum_columns}
    FROM sums_of_tokens(CASE WHEN NOT is_covered(a, b) THEN a END, b);

CREATE OR REPLACE MACRO step_cuts(a, b) AS TABLE
    SELECT run, step, p50_abs_d, p95_abs_d, p99_abs_d
    FROM step_quantiles
    WHERE pass_a = CASE WHEN is_covered(a, b) THEN a END AND pass_b = b
    UNION ALL
    SELECT run, step, cuts[1], cuts[2], cuts[3]
    FROM (
        SELECT run, step, quantile_cont(abs(d), [0.5, 0.95, 0.99]) AS cuts
        FROM pair_tokens(CASE WHEN NOT is_covered(a, b) THEN a END, b)
        WHERE d IS NOT NULL
        GROUP BY run, step
    );

CREATE OR REPLACE MACRO run_cuts(a, b) AS TABLE
    SELECT run, p50_abs_d, p95_abs_d, p99_abs_d, quantile_error
    FROM run_quantiles
    WHERE pass_a = CASE WHEN is_run_covered(a, b) THEN a END AND pass_b = b
    UNION ALL
    SELECT run, cuts[1], cuts[2], cuts[3], 0.0::DOUBLE
    FROM (
        SELECT run, quantile_cont(abs(d), [0.5, 0.95, 0.99]) AS cuts
        FROM pair_tokens(CASE WHEN NOT is_run_covered(a, b) THEN a END, b)
        WHERE d IS NOT NULL
        GROUP BY run
    );

-- Stored statistics of groups, without quantiles.
CREATE OR REPLACE MACRO kept_groups(a, b, by_step) AS TABLE
    SELECT run, step, {statistics}
    FROM step_statistics
    WHERE pass_a = CASE WHEN by_step AND is_covered(a, b) THEN a END AND pass_b = b
    UNION ALL
    SELECT run, NULL::BIGINT AS step, {statistics}
    FROM run_statistics
    WHERE pass_a = CASE WHEN NOT by_step AND is_run_covered(a, b) THEN a END AND pass_b = b;

-- Quantiles of single sequences are not stored.
CREATE OR REPLACE MACRO sequence_cuts(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b,
           cuts[1] AS p50_abs_d, cuts[2] AS p95_abs_d, cuts[3] AS p99_abs_d
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, quantile_cont(abs(d), [0.5, 0.95, 0.99]) AS cuts
        FROM pair_tokens(a, b)
        WHERE d IS NOT NULL
        GROUP BY run, step, seq_id, iteration_a, iteration_b
    );
