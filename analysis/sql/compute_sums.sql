-- Sums, quantiles and histograms of a range of steps of one run, which three views have: see trace/sums.py.
INSERT INTO computed_sequence_sums
    SELECT run, {a}, {b}, {sum_columns}
    FROM new_sums;

INSERT INTO computed_step_quantiles
    SELECT {run}, {a}, {b}, step, num_tokens, p50_abs_d, p95_abs_d, p99_abs_d
    FROM new_quantiles;

INSERT INTO computed_step_histograms
    SELECT {run}, {a}, {b}, step, bin, num_tokens
    FROM new_histograms;
