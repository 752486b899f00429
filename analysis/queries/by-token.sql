-- The 50 token ids with the largest share of the mismatch.
-- Unit: nats; share_of_k3 is a share.
-- Source: most of the mismatch is in a few tokens: arXiv 2602.01826 and the IcePop post.
-- Meaning: a special token or a tool marker at the top points to a wrong template or mask.
SELECT run, token_id, count(*) AS num_tokens, avg(d) AS mean_d, avg(abs(d)) AS mean_abs_d,
       max(abs(d)) AS max_abs_d,
       sum(expm1_minus(d)) / sum(sum(expm1_minus(d))) OVER (PARTITION BY run) AS share_of_k3
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, token_id
ORDER BY share_of_k3 DESC, run, token_id
LIMIT 50;
