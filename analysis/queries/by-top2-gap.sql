-- Mismatch by the logit gap between the two most probable tokens, one row per power of four.
-- Unit: nats.
-- Needs: the top-2 gap of either pass.
-- Source: OpenReview QDOKyg7a5e: greedy decoding diverges where the gap is below the logit noise, about 0.03.
-- Meaning: share_within is the share of tokens with |d| above the gap, at which greedy decoding may choose a different
--   token.
SELECT run,
       CASE WHEN top2_gap > 0 THEN 4.0 ** greatest(floor(log2(top2_gap) / 2), -12) ELSE 0.0 END AS gap_from,
       count(*) AS num_tokens, avg(abs(d)) AS mean_abs_d, max(abs(d)) AS max_abs_d,
       avg((abs(d) > top2_gap)::INTEGER) AS share_within
FROM pair_entropies('train', 'rollout')
WHERE mask AND isfinite(d) AND isfinite(top2_gap)
GROUP BY run, gap_from
ORDER BY run, gap_from;
