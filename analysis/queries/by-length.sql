-- Mismatch by response length, one row per power of two.
-- Unit: nats; mean_sum_d, rms_sum_d and max_abs_sum_d use the sum of d over each response.
-- Source: arXiv 2510.26788 (the sum of d decreases with length in bfloat16).
-- Meaning: mean_abs_d shows whether tokens of long responses differ more; rms_sum_d is the rms of ln(sequence ratio).
SELECT run, (2 ** floor(log2(num_tokens)))::BIGINT AS shortest, count(*) AS num_sequences,
       sum(sum_abs_d) / sum(num_tokens) AS mean_abs_d, avg(sum_d) AS mean_sum_d,
       sqrt(avg(sum_d * sum_d)) AS rms_sum_d, max(abs(sum_d)) AS max_abs_sum_d
FROM pair_responses('train', 'rollout')
GROUP BY run, shortest
ORDER BY run, shortest;
