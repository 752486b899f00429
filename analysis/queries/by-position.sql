-- Mismatch by the token's position in the response, one row per power of two.
-- Unit: nats.
-- Source: arXiv 2510.26788, section on the length of responses; AknA13/train-infer-mismatch finds it flat.
-- Meaning: rounding gives a flat profile. A jump at one position points to a cache, window or rotary-embedding bug
--   there; a steady rise points to an error that accumulates over tokens.
SELECT run,
       CASE WHEN position = 0 THEN 0 ELSE (2 ** floor(log2(position)))::BIGINT END AS first_position,
       count(*) AS num_tokens, avg(d) AS mean_d, avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d,
       max(abs(d)) AS max_abs_d
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, first_position
ORDER BY run, first_position;
