-- slime 0.3.1's numbers: policy_loss_function and vanilla_tis_function of slime/backends/megatron_utils/loss.py, reduced by
-- get_sum_of_sample_mean and reduce_train_step_metrics of cp_utils.py; and as mis_*, those of compute_mis_weights of
-- examples/train_infer_mismatch_helper/mis.py. Pass a is the trainer (log_probs at the sampling weights), pass b the rollout;
-- d = a - b over unmasked tokens.
--   Each number is the mean over sequences of the mean over tokens, which is 0 for a sequence without tokens. With
--   calculate_per_token_loss, it is the sum over tokens divided by the number of tokens, where a sequence without tokens adds
--   one to the divisor. A sequence-level value is included once for each token of the sequence.
--   tis = exp(d), not truncated; tis_clipfrac = share of tis outside [tis_clip_low, tis_clip]; tis_abs = |tis - 1|.
--   ppo_kl = mean of a - current, ois = mean of exp(current - a); NULL without the `current` pass.
--   mis_kl = -d, mis_k3_kl = exp(d) - 1 - d. From a sequence's mean logprobs: mis_*_log_ppl = -mean, mis_*_ppl its exp,
--   mis_log_ppl_diff = rollout - training, mis_ppl_ratio its exp. With rho = exp(d), mis_chi2_token = mean of rho^2 - 1;
--   mis_chi2_seq is the same for the product of rho over a sequence.
--   With use_tis, weights are exp(d) per token, exp(sum of d) per sequence, or exp(mean of d) per sequence (geometric). They
--   are truncated, clipped or masked. With use_rs, tokens are rejected by such weights; a sequence is rejected as a whole if
--   the ratio of any token is below the veto. Rejected tokens are left out of the sums of train_rollout_logprob_abs_diff and
--   ppo_kl, but not out of the divisors.
--   mis_is_ratio_*_final are per sequence, after division by the batch's mean weight (tis_batch_normalize).
-- slime averages over rollouts of several samples and normalizes weights per micro-batch; here, every sequence is a separate
-- rollout, and there is one batch. slime multiplies by the mask; here, masked tokens are left out.

-- slime_mean(...): mean of a number with slime's divisor; slime_spread(...): mean of a sequence-level value with this divisor.
CREATE OR REPLACE MACRO slime_mean(total, num_tokens, calculate_per_token_loss) AS
    sum(CASE WHEN calculate_per_token_loss THEN total ELSE total / greatest(num_tokens, 1) END)
    / sum(CASE WHEN calculate_per_token_loss THEN greatest(num_tokens, 1) ELSE 1 END);
CREATE OR REPLACE MACRO slime_spread(x, num_tokens, calculate_per_token_loss) AS
    sum(CASE WHEN num_tokens = 0 THEN 0.0 WHEN calculate_per_token_loss THEN x * num_tokens ELSE x END)
    / sum(CASE WHEN calculate_per_token_loss THEN greatest(num_tokens, 1) ELSE 1 END);

-- slime_weight(...): exp of the log-ratio at the given level, clamped to 20 nats.
CREATE OR REPLACE MACRO slime_weight(level, d, sum_d, num_tokens) AS
    exp(torch_clamp(CASE level WHEN 'token' THEN d WHEN 'sequence' THEN sum_d WHEN 'geometric' THEN sum_d / num_tokens
                               ELSE error('tis_level and rs_level: token, sequence or geometric') END, -20.0, 20.0));
CREATE OR REPLACE MACRO slime_inside(x, lower, upper) AS (x >= lower AND x <= upper AND NOT isnan(x));

-- slime_kept(...): true unless bounds on weights or the veto reject the token. `o` are the options.
CREATE OR REPLACE MACRO slime_kept(o, d, sum_d, num_tokens, has_catastrophic) AS
    (o['tis_mode'] <> 'mask'
     OR slime_inside(slime_weight(o['tis_level'], d, sum_d, num_tokens), o['tis_lower'], o['tis_upper']))
    AND (NOT o['use_rs']
         OR (slime_inside(slime_weight(o['rs_level'], d, sum_d, num_tokens), o['rs_lower'], o['rs_upper'])
             AND NOT has_catastrophic));

-- slime_tokens(a, b): d of each unmasked token. If a and b are the same pass, each iteration is paired with itself.
CREATE OR REPLACE MACRO slime_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprob_a::DOUBLE AS train, logprob_b::DOUBLE AS rollout, d
    FROM pair(a, b)
    WHERE mask AND d IS NOT NULL AND (a <> b OR iteration_a = iteration_b);

-- slime_sequences(a, b, ...): sums of each sequence with tokens; like slime, compares d with the float32 logarithm of the veto.
CREATE OR REPLACE MACRO slime_sequences(a, b, tis_clip, tis_clip_low, veto) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, sum(d) AS sum_d, sum(abs(d)) AS sum_abs_d,
           sum(exp(d)) AS sum_tis, sum(abs(expm1(d))) AS sum_tis_abs,
           count(*) FILTER (isnan(d) OR exp(d) < tis_clip_low OR exp(d) > tis_clip) AS num_outside,
           sum(expm1_minus(d)) AS sum_k3, avg(train) AS mean_train, avg(rollout) AS mean_rollout,
           avg(expm1(2 * torch_clamp(d, -20.0, 20.0))) AS chi2_token,
           expm1(2 * torch_clamp(sum(d), -20.0, 20.0)) AS chi2_seq,
           count(*) FILTER (veto > 0 AND below(d, ln(CASE WHEN veto > 0 THEN veto::FLOAT END)::FLOAT::DOUBLE))
               AS num_catastrophic
    FROM slime_tokens(a, b)
    GROUP BY ALL;

-- slime_weights(...): token weights of each sequence, before and after applying the bounds.
CREATE OR REPLACE MACRO slime_weights(a, b, o) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, sum(weight) AS sum_weight,
           sum(bounded) AS sum_bounded, torch_min(bounded) AS min_bounded, torch_max(bounded) AS max_bounded,
           count(*) FILTER (below(weight, o['tis_lower'])) AS num_tis_low,
           count(*) FILTER (above(weight, o['tis_upper'])) AS num_tis_high,
           count(*) FILTER (below(rs_weight, o['rs_lower'])) AS num_rs_low,
           count(*) FILTER (above(rs_weight, o['rs_upper'])) AS num_rs_high,
           coalesce(sum(abs(d)) FILTER (slime_kept(o, d, sum_d, num_tokens, num_catastrophic > 0)), 0.0) AS sum_kept_abs_d
    FROM (
        SELECT *,
               CASE o['tis_mode'] WHEN 'truncate' THEN torch_clamp(weight, 0.0, o['tis_upper'])
                                  WHEN 'clip' THEN torch_clamp(weight, o['tis_lower'], o['tis_upper'])
                                  WHEN 'mask' THEN weight
                                  ELSE error('tis_mode: truncate, clip or mask') END AS bounded
        FROM (
            SELECT *, slime_weight(o['tis_level'], d, sum_d, num_tokens) AS weight,
                   slime_weight(o['rs_level'], d, sum_d, num_tokens) AS rs_weight
            FROM slime_tokens(a, b)
            JOIN slime_sequences(a, b, 0.0, 0.0, o['veto']) USING (run, step, seq_id, iteration_a, iteration_b)
            WHERE o['use_tis']
        )
    )
    GROUP BY ALL;

-- slime_kept_kl(...): sum of a - current over the kept tokens.
CREATE OR REPLACE MACRO slime_kept_kl(a, b, o) AS TABLE
    SELECT run, step, seq_id, iteration AS iteration_a, sum(-stale) AS sum_kept_kl
    FROM pair_now(a, b, 'current')
    JOIN slime_sequences(a, b, 0.0, 0.0, o['veto']) AS sequences USING (run, step, seq_id)
    WHERE o['use_tis'] AND mask AND stale IS NOT NULL
      AND slime_kept(o, d, sequences.sum_d, sequences.num_tokens, sequences.num_catastrophic > 0)
    GROUP BY ALL;

-- slime_updates(...): per-sequence change of logprobs due to the updates since sampling.
CREATE OR REPLACE MACRO slime_updates(a, b, o) AS TABLE
    SELECT run, step, seq_id, coalesce(CASE WHEN o['use_tis'] THEN sum_kept_kl ELSE sum_kl END, 0.0) AS sum_kl,
           coalesce(num_tokens, 0) AS n, coalesce(sum_ois, 0.0) AS sum_ois
    FROM (SELECT * FROM pair_keys('current', a, NULL, NULL, NULL) WHERE a <> 'current' OR iteration_a = iteration_b)
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, sum(-d) AS sum_kl, sum(exp(d)) AS sum_ois
        FROM slime_tokens('current', a)
        GROUP BY ALL
    ) USING (run, step, seq_id, iteration_a, iteration_b)
    LEFT JOIN slime_kept_kl(a, b, o) USING (run, step, seq_id, iteration_a);

-- slime_rows(...): per-sequence sums; 0 for a sequence without tokens.
CREATE OR REPLACE MACRO slime_rows(a, b, tis_clip, tis_clip_low, o) AS TABLE
    SELECT run, step, seq_id, coalesce(num_tokens, 0) AS n,
           coalesce(CASE WHEN o['use_tis'] THEN sum_kept_abs_d ELSE sum_abs_d END, 0.0) AS sum_abs_d,
           coalesce(sum_tis, 0.0) AS sum_tis, coalesce(num_outside, 0) AS num_outside, coalesce(sum_tis_abs, 0.0) AS sum_tis_abs,
           coalesce(-sum_d, 0.0) AS sum_kl, coalesce(sum_k3, 0.0) AS sum_k3, mean_train, mean_rollout, chi2_token, chi2_seq,
           coalesce(num_catastrophic, 0) AS num_catastrophic,
           coalesce(sum_weight, 0.0) AS sum_weight, coalesce(sum_bounded, 0.0) AS sum_bounded, min_bounded, max_bounded,
           coalesce(num_tis_low, 0) AS num_tis_low, coalesce(num_tis_high, 0) AS num_tis_high,
           coalesce(num_rs_low, 0) AS num_rs_low, coalesce(num_rs_high, 0) AS num_rs_high
    FROM pair_keys(a, b, NULL, NULL, NULL)
    LEFT JOIN slime_sequences(a, b, tis_clip, tis_clip_low, o['veto']) USING (run, step, seq_id, iteration_a, iteration_b)
    LEFT JOIN slime_weights(a, b, o) USING (run, step, seq_id, iteration_a, iteration_b);

CREATE OR REPLACE MACRO slime_groups(a, b, by_step, tis_clip, tis_clip_low, per_token, o) AS TABLE
    SELECT found.run, found.step, train_rollout_logprob_abs_diff, tis, tis_clipfrac, tis_abs, ppo_kl, ois,
           mis_training_log_ppl, mis_training_ppl, mis_rollout_log_ppl, mis_rollout_ppl, mis_kl, mis_k3_kl,
           mis_log_ppl_diff, mis_log_ppl_abs_diff, mis_ppl_ratio, mis_chi2_token, mis_chi2_seq,
           mis_tis_weight_before_bound,
           CASE WHEN o['tis_mode'] = 'truncate' THEN tis_high END AS mis_tis_truncate_fraction,
           CASE WHEN o['tis_mode'] = 'clip' THEN tis_low END AS mis_tis_clip_fraction_low,
           CASE WHEN o['tis_mode'] = 'clip' THEN tis_high END AS mis_tis_clip_fraction_high,
           CASE WHEN o['tis_mode'] = 'mask' THEN tis_low END AS mis_tis_mask_fraction_low,
           CASE WHEN o['tis_mode'] = 'mask' THEN tis_high END AS mis_tis_mask_fraction_high,
           mis_tis_weight_after_bound, mis_rs_mask_fraction_low, mis_rs_mask_fraction_high,
           mis_rs_catastrophic_token_fraction, mis_rs_catastrophic_seq_fraction,
           mis_tis_weight_after_bound AS mis_is_ratio_mean_after_tis_rs,
           factor * share_full AS mis_batch_norm_factor,
           mean_bounded / factor AS mis_is_ratio_mean_final, min_bounded / factor AS mis_is_ratio_min_final,
           max_bounded / factor AS mis_is_ratio_max_final
    FROM (
        SELECT *,
               CASE WHEN NOT o['tis_batch_normalize'] THEN 1.0
                    WHEN o['tis_level'] = 'token' AND above(mean_of_tokens, 1e-8) THEN mean_of_tokens
                    WHEN o['tis_level'] = 'sequence' AND above(mean_of_sequences, 1e-8) THEN mean_of_sequences
                    ELSE 1.0 END AS factor
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
                   slime_spread(chi2_seq, n, per_token) AS mis_chi2_seq,
                   slime_mean(sum_weight, n, per_token) AS mis_tis_weight_before_bound,
                   slime_mean(sum_bounded, n, per_token) AS mis_tis_weight_after_bound,
                   slime_mean(num_tis_low, n, per_token) AS tis_low,
                   slime_mean(num_tis_high, n, per_token) AS tis_high,
                   slime_mean(num_rs_low, n, per_token) AS mis_rs_mask_fraction_low,
                   slime_mean(num_rs_high, n, per_token) AS mis_rs_mask_fraction_high,
                   slime_mean(num_catastrophic, n, per_token) AS mis_rs_catastrophic_token_fraction,
                   slime_spread((num_catastrophic > 0)::INTEGER, n, per_token) AS mis_rs_catastrophic_seq_fraction,
                   slime_spread(1, n, per_token) AS share_full,
                   slime_spread(sum_bounded / n, n, per_token) AS mean_bounded,
                   slime_spread(min_bounded, n, per_token) AS min_bounded,
                   slime_spread(max_bounded, n, per_token) AS max_bounded,
                   sum(sum_bounded) / greatest(sum(n), 1) AS mean_of_tokens,
                   sum(sum_bounded / greatest(n, 1)) / count(*) AS mean_of_sequences
            FROM slime_rows(a, b, tis_clip, tis_clip_low, o)
            GROUP BY ALL
        )
    ) AS found
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, slime_mean(sum_kl, n, per_token) AS ppo_kl,
               slime_mean(sum_ois, n, per_token) AS ois
        FROM slime_updates(a, b, o)
        GROUP BY ALL
    ) AS currently ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    WHERE total_tokens > 0
    ORDER BY found.run, found.step;

-- slime_options(...): the options of mis.py, with its defaults for missing bounds. A veto of 0 rejects nothing.
CREATE OR REPLACE MACRO slime_options(
    use_tis, tis_level, tis_mode, tis_lower_bound, tis_upper_bound, tis_batch_normalize, use_rs, rs_level, rs_lower_bound,
    rs_upper_bound, rs_veto_threshold
) AS {
    'use_tis': use_tis, 'tis_level': tis_level, 'tis_mode': tis_mode, 'tis_upper': tis_upper_bound::DOUBLE,
    'tis_lower': coalesce(tis_lower_bound::DOUBLE, 1 / tis_upper_bound::DOUBLE),
    'tis_batch_normalize': tis_batch_normalize, 'use_rs': use_rs, 'rs_level': rs_level,
    'rs_lower': coalesce(rs_lower_bound::DOUBLE, tis_lower_bound::DOUBLE, 1 / tis_upper_bound::DOUBLE),
    'rs_upper': coalesce(rs_upper_bound::DOUBLE, tis_upper_bound::DOUBLE),
    'veto': coalesce(rs_veto_threshold::DOUBLE, 0.0)
};

CREATE OR REPLACE MACRO slime_numbers(a, b, by_step, tis_clip, tis_clip_low, per_token, use_tis, tis_level, tis_mode, tis_lower, tis_upper,
                                      normalize, use_rs, rs_level, rs_lower, rs_upper, veto) AS TABLE
    SELECT * FROM slime_groups(a, b, by_step, tis_clip, tis_clip_low, per_token,
                               slime_options(use_tis, tis_level, tis_mode, tis_lower, tis_upper, normalize, use_rs, rs_level,
                                             rs_lower, rs_upper, veto));
