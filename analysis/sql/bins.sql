-- |d| of the tokens of a range of steps whose bin is one of a few.
SELECT CASE WHEN d = 0 THEN -2147483648 ELSE floor(log2(abs(d)) * 1000)::INTEGER END AS bin, abs(d) AS abs_d
FROM pair_tokens({a}, {b}, {run}, {first_step}, {last_step})
WHERE d IS NOT NULL
  AND CASE WHEN d = 0 THEN -2147483648 ELSE floor(log2(abs(d)) * 1000)::INTEGER END IN ({bins});
