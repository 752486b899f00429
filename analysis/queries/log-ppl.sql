-- Log-perplexity of the responses under each pass, and two forms of its difference, one row per step.
-- Unit: nats per token; log_ppl_abs_diff_sum in nats per sequence.
-- Source: verl, rollout_corr/* (means of -logprob over a sequence's tokens, then over sequences); arXiv 2602.01826, eq. 8
--   for log_ppl_abs_diff_sum, which sums d over a sequence instead.
-- Meaning: log_ppl_diff is the bias of the mismatch (above 0: the trainer is less confident), log_ppl_abs_diff its size; the
--   sum grows with length even if no token got worse.
SELECT run, step, count(*) AS num_sequences, avg(log_ppl_a) AS log_ppl_a, avg(log_ppl_b) AS log_ppl_b,
       avg(log_ppl_a - log_ppl_b) AS log_ppl_diff, avg(abs(log_ppl_a - log_ppl_b)) AS log_ppl_abs_diff,
       max(log_ppl_a - log_ppl_b) AS log_ppl_diff_max, min(log_ppl_a - log_ppl_b) AS log_ppl_diff_min,
       avg(exp(log_ppl_a - log_ppl_b)) AS ppl_ratio, avg(abs(sum_d)) AS log_ppl_abs_diff_sum
FROM pair_responses('train', 'rollout')
GROUP BY run, step
ORDER BY run, step;
