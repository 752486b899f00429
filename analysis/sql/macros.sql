-- Scalar macros shared by the statistics.

-- exp(x) - 1 - x, accurate for every x: the plain form loses all digits below 1e-8 (relative error 160 at 1e-9).
-- Below 0.02 a series to x^8 is accurate to 1e-14; above, exp(x) - 1 = 2 exp(x / 2) sinh(x / 2).
CREATE OR REPLACE MACRO expm1_minus(x) AS
    CASE WHEN abs(x) < 0.02
         THEN x * x * (0.5 + x * (1 / 6.0::DOUBLE + x * (1 / 24.0::DOUBLE + x * (1 / 120.0::DOUBLE
              + x * (1 / 720.0::DOUBLE + x * (1 / 5040.0::DOUBLE + x / 40320.0::DOUBLE))))))
         WHEN abs(x) <= 2 THEN 2 * exp(x / 2) * sinh(x / 2) - x
         ELSE exp(x) - 1 - x
    END;

-- exp(x) - 1, accurate for every x.
CREATE OR REPLACE MACRO expm1(x) AS
    CASE WHEN abs(x) < 0.02 THEN x + expm1_minus(x)
         WHEN abs(x) <= 2 THEN 2 * exp(x / 2) * sinh(x / 2)
         ELSE exp(x) - 1
    END;

-- Statistics as in torch: min and max return NaN if any value is NaN, std divides by n - 1, and comparisons with NaN are false.
-- In DuckDB, NaN is the largest number, and the standard deviation of non-finite values is an error.
CREATE OR REPLACE MACRO torch_min(x) AS CASE WHEN bool_or(isnan(x)) THEN 'NaN'::DOUBLE ELSE min(x) END;
CREATE OR REPLACE MACRO torch_max(x) AS CASE WHEN bool_or(isnan(x)) THEN 'NaN'::DOUBLE ELSE max(x) END;
CREATE OR REPLACE MACRO torch_std(x) AS
    CASE WHEN count(x) = 0 THEN NULL
         WHEN bool_and(isfinite(x)) AND count(x) > 1 THEN stddev_samp(x) FILTER (isfinite(x))
         ELSE 'NaN'::DOUBLE END;
CREATE OR REPLACE MACRO torch_squares(x) AS -- the sum of squares around the mean
    CASE WHEN count(x) = 0 THEN NULL
         WHEN bool_and(isfinite(x)) THEN var_pop(x) FILTER (isfinite(x)) * count(x)
         ELSE 'NaN'::DOUBLE END;
CREATE OR REPLACE MACRO torch_median(x) AS
    CASE WHEN bool_or(isnan(x)) THEN 'NaN'::DOUBLE ELSE quantile_disc(x, 0.5) END;
CREATE OR REPLACE MACRO above(x, bound) AS (x > bound AND NOT isnan(x));
CREATE OR REPLACE MACRO below(x, bound) AS (x < bound AND NOT isnan(x));
CREATE OR REPLACE MACRO torch_clamp(x, lower, upper) AS CASE WHEN isnan(x) THEN x ELSE greatest(least(x, upper), lower) END;

-- Number of equal elements at the start of two lists.
CREATE OR REPLACE MACRO common_prefix(x, y) AS
    coalesce(list_min(list_filter(range(1, least(len(x), len(y)) + 1), lambda place: x[place] <> y[place])) - 1,
             least(len(x), len(y)));

-- Variance, or 0 if rounding made it negative. NaN stays NaN.
CREATE OR REPLACE MACRO floored(x) AS CASE WHEN x < 0 THEN 0.0 ELSE x END;

-- Sum and mean in a fixed order, so that threads do not change the last digits.
CREATE OR REPLACE MACRO sum_in_order(x, place) AS sum(x ORDER BY place);
CREATE OR REPLACE MACRO mean_in_order(x, place) AS sum(x ORDER BY place) / count(x);
