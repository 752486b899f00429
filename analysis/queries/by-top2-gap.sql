-- How far the passes lie apart by the gap between the two most probable tokens, a row a power of four.
-- Unit: nats.
-- Needs: the top-2 gap of either pass.
-- Source: OpenReview QDOKyg7a5e: greedy decoding parts where the gap is below the noise of the logits, about 0.03.
-- Meaning: share_within is the share whose |d| exceeds the gap: there greedy decoding may take another token.
SELECT run,
       CASE WHEN top2_gap > 0 THEN 4.0 ** greatest(floor(log2(top2_gap) / 2), -12) ELSE 0.0 END AS gap_from,
       count(*) AS num_tokens,
       avg(abs(d)) AS mean_abs_d,
       max(abs(d)) AS max_abs_d,
       avg((abs(d) > top2_gap)::INTEGER) AS share_within
FROM pair_entropies('train', 'rollout')
WHERE mask AND isfinite(d) AND isfinite(top2_gap)
GROUP BY run, gap_from
ORDER BY run, gap_from;
