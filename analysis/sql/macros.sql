-- Scalar macros that the statistics share.

-- exp(x) - 1 - x, accurate for every x: the plain form loses all digits below 1e-8 (relative error 160 at 1e-9).
-- Below 0.02 the series to x^8 is within 1e-14 of it.
CREATE OR REPLACE MACRO expm1_minus(x) AS
    CASE WHEN abs(x) < 0.02
         THEN x * x * (0.5 + x * (1 / 6.0::DOUBLE + x * (1 / 24.0::DOUBLE + x * (1 / 120.0::DOUBLE
              + x * (1 / 720.0::DOUBLE + x * (1 / 5040.0::DOUBLE + x / 40320.0::DOUBLE))))))
         ELSE exp(x) - 1 - x
    END;

-- exp(x) - 1, accurate for every x.
CREATE OR REPLACE MACRO expm1(x) AS x + expm1_minus(x);
