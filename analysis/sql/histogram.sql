-- How many tokens of a range of steps have |d| in each bin; bins are in order, and a thousandth of an octave wide.
SELECT CASE WHEN d = 0 THEN -2147483648 ELSE floor(log2(abs(d)) * 1000)::INTEGER END AS bin, count(*) AS num_tokens
FROM pair_tokens({a}, {b}, {run}, {first_step}, {last_step})
WHERE d IS NOT NULL
GROUP BY bin;
