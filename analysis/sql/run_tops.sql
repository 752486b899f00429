-- run_tops: maxima over each run, for grouped_run.sql.
CREATE OR REPLACE TEMP TABLE run_tops AS
    SELECT run, max(sum_d) AS peak, max(peak_d) AS top_d, max(peak_a) AS top_a, max(peak_b) AS top_b
    FROM sequence_sums
    WHERE pass_a = {a} AND pass_b = {b} AND list_contains({runs}, run)
    GROUP BY run;
