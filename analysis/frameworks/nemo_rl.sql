-- NeMo-RL 0.7.0's numbers: ClippedPGLossFn of nemo_rl/algorithms/loss/loss_functions.py and
-- compute_and_apply_seq_logprob_error_masking of nemo_rl/algorithms/grpo.py. Pass a is the trainer (prev_logprobs), pass b
-- the generation; d = a - b. Unless stated otherwise, means are over all unmasked tokens.
--   token_mult_prob_error = mean(exp(|d|)); *_seq_mult_prob_error is computed in the same way for each sequence with tokens.
--   gen_kl_error = mean of k3 = exp(d) - 1 - d; policy_kl_error is the same for -d. With k1, they are the means of -d and d;
--   with k2, of d^2 / 2.
--   js_divergence_error = mean of k3(a, m) / 2 + k3(b, m) / 2, where m is the mean of both probabilities.
--   sampling_importance_ratio = mean of exp(d), truncated or masked according to the options, where infinities and NaN become
--   0. At sequence level, it is the mean of exp(sum of d) over all sequences, times train_micro_batch_size, because NeMo-RL
--   multiplies the weights of a micro-batch by the mask of each of its sequences.
--   is_oob_ratio = share of tokens outside the bounds; for seq-mask-tis, share of sequences with exp(mean of d) outside them.
--   approx_entropy = -mean(exp(current - b) * current). probs_ratio = mean of exp(current - a); at sequence level, of exp(mean
--   of current - a); with disable_ppo_ratio, of current. probs_ratio_clamped is the same, clamped to 1 - ratio_clip_min and
--   1 + ratio_clip_max. All of these are NULL without the `current` pass. For the smallest and largest ratio, NeMo-RL ignores
--   micro-batches in which it is infinite, and logs -1 if none is left; here, this applies to sequences.
--   With seq_logprob_error_threshold, sequences with a larger seq_mult_prob_error are masked and excluded from all other
--   numbers. num_masked_seqs_by_logprob_error (num_masked_seqs in the function) is their number, masked_correct_pct the share
--   of them with a reward of 1. *_seq_mult_prob_error_after_mask are over the remaining sequences, 0 if there are none.
-- NeMo-RL multiplies by the mask; here, masked tokens are left out, whatever their logprob. One exception: a sequence ratio is
-- 0 if the logprob of any token, even a masked one, is NaN or infinite (NaN * 0 is NaN, which NeMo-RL then replaces by 0).

CREATE OR REPLACE MACRO nemo_rl_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprob_a::DOUBLE AS prev, logprob_b::DOUBLE AS generation, d,
           expm1_minus(d) AS k3, expm1_minus(-d) AS k3_reverse
    FROM pair(a, b)
    WHERE mask AND d IS NOT NULL AND (a <> b OR iteration_a = iteration_b);

-- exp(x), or 0 if that is not finite.
CREATE OR REPLACE MACRO nemo_rl_ratio(x) AS CASE WHEN isfinite(exp(x)) THEN exp(x) ELSE 0.0 END;

-- log((exp(x) + exp(y)) / 2), computed from the larger to avoid overflow.
CREATE OR REPLACE MACRO nemo_rl_mixture(x, y) AS
    CASE WHEN isfinite(greatest(x, y)) THEN greatest(x, y) + ln(0.5 + 0.5 * exp(-abs(x - y))) ELSE x + y END;

CREATE OR REPLACE MACRO nemo_rl_cut(ratio, kind, upper, lower) AS
    CASE WHEN kind = 'tis' THEN torch_clamp(ratio, coalesce(lower, 0.0), upper)
         WHEN kind = 'icepop' AND (ratio < lower OR ratio > upper) THEN 0.0
         ELSE ratio END;

-- nemo_rl_rows(...): per-sequence sums; is_kept is true if the sequence's error is within the threshold.
CREATE OR REPLACE MACRO nemo_rl_rows(a, b, kl_type, of_sequences, kind, upper, lower, threshold) AS TABLE
    SELECT *, threshold IS NULL OR (coalesce(mean_mult, 0.0) <= threshold AND NOT isnan(coalesce(mean_mult, 0.0))) AS is_kept,
           CASE WHEN of_sequences THEN nemo_rl_cut(sequence_ratio, kind, upper, lower)
                WHEN kind = 'seq-mask-tis' AND NOT inside THEN 0.0
                ELSE sum_ratio END AS weight,
           CASE WHEN kind = 'seq-mask-tis' THEN (NOT inside)::INTEGER
                WHEN of_sequences
                THEN num_tokens * (sequence_ratio < coalesce(lower, 0.0) OR sequence_ratio > upper)::INTEGER
                ELSE num_oob END AS oob
    FROM (
        SELECT run, step, seq_id, reward, coalesce(num_tokens, 0) AS num_tokens,
               sum_mult, sum_mult / num_tokens AS mean_mult, sum_gen, sum_policy, sum_js,
               coalesce(sum_ratio, 0.0) AS sum_ratio, coalesce(num_oob, 0) AS num_oob,
               CASE WHEN is_lost THEN 0.0 ELSE nemo_rl_ratio(coalesce(sum_d, 0.0)) END AS sequence_ratio,
               coalesce(exp(mean_finite_d), 1.0) BETWEEN lower AND upper AS inside
        FROM pair_keys(a, b, NULL, NULL, NULL)
        JOIN (SELECT run, step, seq_id, reward FROM sequences) USING (run, step, seq_id)
        LEFT JOIN (
            SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens,
                   sum(exp(abs(d))) AS sum_mult,
                   sum(CASE kl_type WHEN 'k1' THEN -d WHEN 'k2' THEN d * d / 2 ELSE k3 END) AS sum_gen,
                   sum(CASE kl_type WHEN 'k1' THEN d WHEN 'k2' THEN d * d / 2 ELSE k3_reverse END) AS sum_policy,
                   sum(0.5 * expm1_minus(prev - nemo_rl_mixture(prev, generation))
                       + 0.5 * expm1_minus(generation - nemo_rl_mixture(prev, generation))) AS sum_js,
                   sum(nemo_rl_cut(nemo_rl_ratio(d), kind, upper, lower)) AS sum_ratio,
                   count(*) FILTER (nemo_rl_ratio(d) < coalesce(lower, 0.0) OR nemo_rl_ratio(d) > upper) AS num_oob,
                   sum(d) AS sum_d, avg(CASE WHEN isfinite(d) THEN d ELSE 0.0 END) AS mean_finite_d
            FROM nemo_rl_tokens(a, b)
            GROUP BY ALL
        ) USING (run, step, seq_id, iteration_a, iteration_b)
        LEFT JOIN (
            SELECT DISTINCT run, step, seq_id, iteration_a, iteration_b, true AS is_lost
            FROM pair(a, b)
            WHERE of_sequences AND NOT mask AND NOT isfinite(d)
        ) USING (run, step, seq_id, iteration_a, iteration_b)
    );

-- nemo_rl_masked(...): sequences masked by the threshold; empty without one.
CREATE OR REPLACE MACRO nemo_rl_masked(a, b, threshold) AS TABLE
    SELECT run, step, seq_id
    FROM nemo_rl_tokens(a, b)
    WHERE threshold IS NOT NULL
    GROUP BY run, step, seq_id, iteration_a, iteration_b
    HAVING NOT (sum(exp(abs(d))) / count(*) <= threshold) OR isnan(sum(exp(abs(d))));

-- nemo_rl_ratios(...): per-sequence statistics of the ratios in the loss.
CREATE OR REPLACE MACRO nemo_rl_ratios(a, b, of_sequences, clip_min, clip_max, disabled, threshold) AS TABLE
    SELECT run, step, seq_id, num_tokens,
           CASE WHEN of_sequences AND NOT disabled THEN num_tokens * exp(mean_d) ELSE sum_ratio END AS sum_ratio,
           CASE WHEN of_sequences AND NOT disabled THEN exp(mean_d) ELSE min_ratio END AS min_ratio,
           CASE WHEN of_sequences AND NOT disabled THEN exp(mean_d) ELSE max_ratio END AS max_ratio,
           CASE WHEN of_sequences AND NOT disabled THEN num_tokens * torch_clamp(exp(mean_d), 1 - clip_min, 1 + clip_max)
                ELSE sum_clamped END AS sum_clamped,
           CASE WHEN of_sequences AND NOT disabled THEN torch_clamp(exp(mean_d), 1 - clip_min, 1 + clip_max)
                ELSE min_clamped END AS min_clamped,
           CASE WHEN of_sequences AND NOT disabled THEN torch_clamp(exp(mean_d), 1 - clip_min, 1 + clip_max)
                ELSE max_clamped END AS max_clamped
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, avg(d) AS mean_d,
               sum(ratio) AS sum_ratio, torch_min(ratio) AS min_ratio, torch_max(ratio) AS max_ratio,
               sum(clamped) AS sum_clamped, torch_min(clamped) AS min_clamped, torch_max(clamped) AS max_clamped
        FROM (
            SELECT *, CASE WHEN disabled THEN ratio ELSE torch_clamp(ratio, 1 - clip_min, 1 + clip_max) END AS clamped
            FROM (
                SELECT run, step, seq_id, iteration_a, iteration_b, d, CASE WHEN disabled THEN prev ELSE exp(d) END AS ratio
                FROM nemo_rl_tokens('current', a)
                ANTI JOIN nemo_rl_masked(a, b, threshold) USING (run, step, seq_id)
            )
        )
        GROUP BY run, step, seq_id, iteration_a, iteration_b
    );

-- nemo_rl_entropies(...): per-sequence sums of the approximate entropy.
CREATE OR REPLACE MACRO nemo_rl_entropies(a, b, threshold) AS TABLE
    SELECT run, step, seq_id, count(*) AS num_tokens, sum(exp(d) * prev) AS sum_entropy
    FROM nemo_rl_tokens('current', b)
    ANTI JOIN nemo_rl_masked(a, b, threshold) USING (run, step, seq_id)
    GROUP BY run, step, seq_id, iteration_a, iteration_b;

CREATE OR REPLACE MACRO nemo_rl_finite(x) AS CASE WHEN NOT isinf(x) THEN x END;

CREATE OR REPLACE MACRO nemo_rl_numbers(
    a, b, by_step, kl_type, of_sequences, kind, upper, lower, micro_batch, threshold, clip_min, clip_max, disabled
) AS TABLE
    SELECT found.run, found.step, token_mult_prob_error, gen_kl_error, policy_kl_error, js_divergence_error,
           sampling_importance_ratio, is_oob_ratio, approx_entropy,
           max_seq_mult_prob_error, mean_seq_mult_prob_error, min_seq_mult_prob_error,
           max_seq_mult_prob_error_after_mask, mean_seq_mult_prob_error_after_mask, min_seq_mult_prob_error_after_mask,
           num_masked AS num_masked_seqs_by_logprob_error,
           CASE WHEN num_masked = 0 THEN 0.0 WHEN num_unrewarded = 0 THEN num_correct / num_masked END AS masked_correct_pct,
           probs_ratio, probs_ratio_min, probs_ratio_max,
           probs_ratio_clamped, probs_ratio_clamped_min, probs_ratio_clamped_max
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(num_tokens) AS num_tokens,
               sum(sum_mult) FILTER (is_kept) / nullif(sum(num_tokens) FILTER (is_kept), 0) AS token_mult_prob_error,
               sum(sum_gen) FILTER (is_kept) / nullif(sum(num_tokens) FILTER (is_kept), 0) AS gen_kl_error,
               sum(sum_policy) FILTER (is_kept) / nullif(sum(num_tokens) FILTER (is_kept), 0) AS policy_kl_error,
               sum(sum_js) FILTER (is_kept) / nullif(sum(num_tokens) FILTER (is_kept), 0) AS js_divergence_error,
               CASE WHEN of_sequences THEN sum(weight) FILTER (is_kept) / nullif(count(*) FILTER (is_kept), 0) * micro_batch
                    ELSE sum(weight) FILTER (is_kept) / nullif(sum(num_tokens) FILTER (is_kept), 0) END
                   AS sampling_importance_ratio,
               CASE WHEN kind IS NOT NULL
                    THEN sum(oob) FILTER (is_kept)
                         / nullif(CASE kind WHEN 'seq-mask-tis' THEN count(*) FILTER (is_kept)
                                            ELSE sum(num_tokens) FILTER (is_kept) END, 0) END
                   AS is_oob_ratio,
               torch_max(mean_mult) AS max_seq_mult_prob_error, avg(mean_mult) AS mean_seq_mult_prob_error,
               torch_min(mean_mult) AS min_seq_mult_prob_error,
               coalesce(torch_max(kept_mult), 0.0) AS max_seq_mult_prob_error_after_mask,
               coalesce(avg(kept_mult), 0.0) AS mean_seq_mult_prob_error_after_mask,
               coalesce(torch_min(kept_mult), 0.0) AS min_seq_mult_prob_error_after_mask,
               count(*) FILTER (NOT is_kept) AS num_masked,
               count(*) FILTER (NOT is_kept AND reward IS NULL) AS num_unrewarded,
               count(*) FILTER (NOT is_kept AND reward = 1) AS num_correct
        FROM (
            SELECT *, CASE WHEN is_kept THEN mean_mult END AS kept_mult
            FROM nemo_rl_rows(a, b, kl_type, of_sequences, kind, upper, lower, threshold)
        )
        GROUP BY ALL
    ) AS found
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, -sum(sum_entropy) / sum(num_tokens) AS approx_entropy
        FROM nemo_rl_entropies(a, b, threshold)
        GROUP BY ALL
    ) AS currently ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(sum_ratio) / sum(num_tokens) AS probs_ratio,
               coalesce(torch_min(nemo_rl_finite(min_ratio)), -1.0) AS probs_ratio_min,
               coalesce(torch_max(nemo_rl_finite(max_ratio)), -1.0) AS probs_ratio_max,
               sum(sum_clamped) / sum(num_tokens) AS probs_ratio_clamped,
               coalesce(torch_min(nemo_rl_finite(min_clamped)), -1.0) AS probs_ratio_clamped_min,
               coalesce(torch_max(nemo_rl_finite(max_clamped)), -1.0) AS probs_ratio_clamped_max
        FROM nemo_rl_ratios(a, b, of_sequences, clip_min, clip_max, disabled, threshold)
        GROUP BY ALL
    ) AS ratios ON ratios.run = found.run AND ratios.step IS NOT DISTINCT FROM found.step
    WHERE num_tokens > 0
    ORDER BY found.run, found.step;
