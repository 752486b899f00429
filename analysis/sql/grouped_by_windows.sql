-- Input rows of group_statistics.sql for groups of any kind, computed in memory.
SELECT *, exp(top_a) * (fall_a - median(fall_a) OVER grouped) AS off_a,
       exp(top_b) * (fall_b - median(fall_b) OVER grouped) AS off_b
FROM (
    SELECT *, fall_from(top_a, peak_a, mean_fall_a) AS fall_a, fall_from(top_b, peak_b, mean_fall_b) AS fall_b
    FROM (
        SELECT *, max(sum_d) OVER grouped AS peak, max(peak_d) OVER grouped AS top_d,
               max(peak_a) OVER grouped AS top_a, max(peak_b) OVER grouped AS top_b
        FROM (SELECT *, CASE WHEN by_step THEN step END AS grouped_step FROM pair_sums(a, b)
                  WHERE (of_runs IS NULL OR list_contains(of_runs, run)) AND (first_step IS NULL OR step >= first_step)
                    AND (last_step IS NULL OR step <= last_step))
        WINDOW grouped AS (PARTITION BY run, grouped_step)
    )
)
WINDOW grouped AS (PARTITION BY run, grouped_step)
