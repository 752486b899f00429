-- Input rows of group_statistics.sql for whole runs. Sums are read three times rather than kept, which saves memory.
WITH run_tops AS MATERIALIZED (
    SELECT run, max(sum_d) AS peak, max(peak_d) AS top_d, max(peak_a) AS top_a, max(peak_b) AS top_b
    FROM sequence_sums
    WHERE pass_a = {a} AND pass_b = {b} AND list_contains({runs}, run)
    GROUP BY run
)
SELECT sums.*, NULL::BIGINT AS grouped_step, peak, top_d,
       exp(top_a) * (fall_from(top_a, peak_a, mean_fall_a) - middle_a) AS off_a,
       exp(top_b) * (fall_from(top_b, peak_b, mean_fall_b) - middle_b) AS off_b
FROM (SELECT * FROM sequence_sums WHERE pass_a = {a} AND pass_b = {b} AND list_contains({runs}, run)) AS sums
JOIN run_tops USING (run)
JOIN (
    SELECT run, median(fall_from(top_a, peak_a, mean_fall_a)) AS middle_a,
           median(fall_from(top_b, peak_b, mean_fall_b)) AS middle_b
    FROM sequence_sums JOIN run_tops USING (run)
    WHERE pass_a = {a} AND pass_b = {b} AND list_contains({runs}, run)
    GROUP BY run
) USING (run)
