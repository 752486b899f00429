-- Steps in a range whose stored sums do not match the scores row by row, or lack quantiles or a histogram.
WITH keys AS (
    SELECT step, seq_id, iteration_a, iteration_b FROM pair_keys({a}, {b}, {run}, {first_step}, {last_step})
),
kept AS (
    SELECT * FROM sequence_sums
    WHERE pass_a = {a} AND pass_b = {b} AND run = {run} AND step BETWEEN {first_step} AND {last_step}
),
kept_keys AS (SELECT step, seq_id, iteration_a, iteration_b FROM kept),
cuts AS (SELECT step FROM step_quantiles WHERE pass_a = {a} AND pass_b = {b} AND run = {run}),
bins AS (SELECT step FROM step_histograms WHERE pass_a = {a} AND pass_b = {b} AND run = {run})
SELECT DISTINCT step
FROM ((FROM keys EXCEPT FROM kept_keys) UNION ALL (FROM kept_keys EXCEPT FROM keys))
UNION
SELECT step FROM kept WHERE num_tokens > 0 AND (step NOT IN (FROM cuts) OR step NOT IN (FROM bins));
