-- Argmax flips by the gap between the two most probable tokens, one row per power of four.
-- Unit: gap_from in nats; shares.
-- Needs: distributions that both passes captured, and the top-2 gap of either.
-- Source: OpenReview QDOKyg7a5e: a flip happens if the noise of two logits exceeds their gap.
-- Meaning: flips only at small gaps come from rounding; flips at gaps of several nats mean a different distribution.
SELECT run,
       CASE WHEN top2_gap > 0 THEN 4.0 ** greatest(floor(log2(top2_gap) / 2), -12) ELSE 0.0 END AS gap_from,
       count(*) AS num_tokens,
       avg(argmax_flip::INTEGER) AS share_flipped
FROM pair_distributions('train', 'rollout')
JOIN pair_entropies('train', 'rollout') USING (run, step, seq_id, iteration_a, iteration_b, position, mask)
WHERE mask AND isfinite(top2_gap) AND argmax_flip IS NOT NULL
GROUP BY run, gap_from
ORDER BY run, gap_from;
