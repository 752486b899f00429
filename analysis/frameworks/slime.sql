-- slime 0.3.1's metrics: policy_loss_function and vanilla_tis_function of slime/backends/megatron_utils/loss.py, reduced by
-- get_sum_of_sample_mean and reduce_train_step_metrics of cp_utils.py; and as mis_*, those of compute_mis_weights of
-- examples/train_infer_mismatch_helper/mis.py. Pass a is the trainer (log_probs at the sampling weights), pass b the rollout;
-- d = a - b over unmasked tokens.
--   Each number is the mean over sequences of the mean over tokens, which is 0 for a sequence without tokens. With
--   calculate_per_token_loss, it is the sum over tokens divided by the number of tokens, where a sequence without tokens adds
--   one to the divisor. A sequence-level value is included once for each token of the sequence.
--   tis = exp(d), not truncated; tis_clipfrac = share of tis outside [tis_clip_low, tis_clip]; tis_abs = |tis - 1|.
--   ppo_kl = mean of a - current, ois = mean of exp(current - a); NULL without the `current` pass.
--   mis_kl = -d, mis_k3_kl = exp(d) - 1 - d. From a sequence's mean logprobs: mis_*_log_ppl = -mean, mis_*_ppl = exp(-mean),
--   mis_log_ppl_diff = rollout - training, mis_ppl_ratio = exp(rollout - training). With rho = exp(d), mis_chi2_token = mean
--   of rho^2 - 1; mis_chi2_seq is the same for the product of rho over a sequence.
-- slime averages over rollouts of several samples; here, every sequence is a separate rollout. slime multiplies by the mask; here,
-- masked tokens are left out.

-- slime_mean(...): mean of a number with slime's divisor; slime_spread(...): mean of a sequence-level value with this divisor.
CREATE OR REPLACE MACRO slime_mean(total, num_tokens, calculate_per_token_loss) AS
    sum(CASE WHEN calculate_per_token_loss THEN total ELSE total / greatest(num_tokens, 1) END)
    / sum(CASE WHEN calculate_per_token_loss THEN greatest(num_tokens, 1) ELSE 1 END);
CREATE OR REPLACE MACRO slime_spread(x, num_tokens, calculate_per_token_loss) AS
    sum(CASE WHEN num_tokens = 0 THEN 0.0 WHEN calculate_per_token_loss THEN x * num_tokens ELSE x END)
    / sum(CASE WHEN calculate_per_token_loss THEN greatest(num_tokens, 1) ELSE 1 END);

-- slime_updates(...): per-sequence change of logprobs due to the updates since sampling.
CREATE OR REPLACE MACRO slime_updates(a) AS TABLE
    SELECT run, step, seq_id, coalesce(sum_kl, 0.0) AS sum_kl, coalesce(num_tokens, 0) AS n,
           coalesce(sum_ois, 0.0) AS sum_ois
    FROM (SELECT * FROM pair_keys('current', a, NULL, NULL, NULL) WHERE a <> 'current' OR iteration_a = iteration_b)
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, sum(-d) AS sum_kl, sum(exp(d)) AS sum_ois
        FROM counted_pair('current', a)
        GROUP BY ALL
    ) USING (run, step, seq_id, iteration_a, iteration_b);

-- slime_rows(...): per-sequence sums; 0 for a sequence without tokens.
CREATE OR REPLACE MACRO slime_rows(a, b, tis_clip, tis_clip_low) AS TABLE
    SELECT run, step, seq_id, coalesce(num_tokens, 0) AS n, coalesce(sum_abs_d, 0.0) AS sum_abs_d,
           coalesce(sum_tis, 0.0) AS sum_tis, coalesce(num_outside, 0) AS num_outside, coalesce(sum_tis_abs, 0.0) AS sum_tis_abs,
           coalesce(-sum_d, 0.0) AS sum_kl, coalesce(sum_k3, 0.0) AS sum_k3, mean_train, mean_rollout, chi2_token, chi2_seq
    FROM pair_keys(a, b, NULL, NULL, NULL)
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, sum(d) AS sum_d, sum(abs(d)) AS sum_abs_d,
               sum(exp(d)) AS sum_tis, sum(abs(expm1(d))) AS sum_tis_abs,
               count(*) FILTER (isnan(d) OR exp(d) < tis_clip_low OR exp(d) > tis_clip) AS num_outside,
               sum(expm1_minus(d)) AS sum_k3, avg(logprob_a::DOUBLE) AS mean_train, avg(logprob_b::DOUBLE) AS mean_rollout,
               avg(expm1(2 * torch_clamp(d, -20.0, 20.0))) AS chi2_token,
               expm1(2 * torch_clamp(sum(d), -20.0, 20.0)) AS chi2_seq
        FROM counted_pair(a, b)
        GROUP BY ALL
    ) USING (run, step, seq_id, iteration_a, iteration_b);

CREATE OR REPLACE MACRO slime_numbers(a, b, by_step, tis_clip, tis_clip_low, per_token) AS TABLE
    SELECT found.run, found.step, train_rollout_logprob_abs_diff, tis, tis_clipfrac, tis_abs, ppo_kl, ois,
           found.* EXCLUDE (run, step, total_tokens, train_rollout_logprob_abs_diff, tis, tis_clipfrac, tis_abs)
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(n) AS total_tokens,
               slime_mean(sum_abs_d, n, per_token) AS train_rollout_logprob_abs_diff,
               slime_mean(sum_tis, n, per_token) AS tis,
               slime_mean(num_outside, n, per_token) AS tis_clipfrac,
               slime_mean(sum_tis_abs, n, per_token) AS tis_abs,
               slime_spread(-mean_train, n, per_token) AS mis_training_log_ppl,
               slime_spread(exp(-mean_train), n, per_token) AS mis_training_ppl,
               slime_spread(-mean_rollout, n, per_token) AS mis_rollout_log_ppl,
               slime_spread(exp(-mean_rollout), n, per_token) AS mis_rollout_ppl,
               slime_mean(sum_kl, n, per_token) AS mis_kl, slime_mean(sum_k3, n, per_token) AS mis_k3_kl,
               slime_spread(mean_rollout - mean_train, n, per_token) AS mis_log_ppl_diff,
               slime_spread(abs(mean_rollout - mean_train), n, per_token) AS mis_log_ppl_abs_diff,
               slime_spread(exp(mean_rollout - mean_train), n, per_token) AS mis_ppl_ratio,
               slime_spread(chi2_token, n, per_token) AS mis_chi2_token,
               slime_spread(chi2_seq, n, per_token) AS mis_chi2_seq
        FROM slime_rows(a, b, tis_clip, tis_clip_low)
        GROUP BY ALL
    ) AS found
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, slime_mean(sum_kl, n, per_token) AS ppo_kl,
               slime_mean(sum_ois, n, per_token) AS ois
        FROM slime_updates(a)
        GROUP BY ALL
    ) AS currently ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    WHERE total_tokens > 0
    ORDER BY found.run, found.step;
