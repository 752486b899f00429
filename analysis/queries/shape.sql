-- Shape of the mismatch: how the passes correlate, and how many tokens agree or are far off, one row per step.
-- Unit: nats; correlations; shares of the tokens.
-- Source: none; a first look, together with concentration.
-- Meaning: if few tokens are far off while most agree, single values are wrong although the mean is small. If corr_far,
--   over the tokens with |d| > 0.3, is near 0, those values belong to different tokens. If no token agrees closely,
--   weights, context or settings differ. Exact zeros are placeholders unless the shares at 1e-6, 1e-5 and so on
--   increase gradually.
SELECT run, step, count(*) AS num_tokens, avg(logprob_a) AS mean_a, avg(logprob_b) AS mean_b,
       corr(logprob_a::DOUBLE, logprob_b::DOUBLE) AS corr,
       corr(logprob_a::DOUBLE, logprob_b::DOUBLE) FILTER (abs(d) > 0.3) AS corr_far,
       avg((abs(d) < 0.02)::INTEGER) AS share_near, avg((abs(d) > 1)::INTEGER) AS share_far,
       avg((logprob_a = 0)::INTEGER) AS share_zero_a, avg((logprob_b = 0)::INTEGER) AS share_zero_b,
       sqrt(avg(d * d)) AS rms_d, max(abs(d)) AS max_abs_d
FROM pair('train', 'rollout')
WHERE mask AND isfinite(d)
GROUP BY run, step
ORDER BY run, step;
