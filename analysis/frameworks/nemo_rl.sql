-- NeMo-RL 0.7.0's metrics: ClippedPGLossFn of nemo_rl/algorithms/loss/loss_functions.py and, before masking,
-- compute_and_apply_seq_logprob_error_masking of nemo_rl/algorithms/grpo.py. Pass a is the trainer (prev_logprobs), pass b
-- the generation; d = a - b. Unless stated otherwise, means are over all unmasked tokens.
--   token_mult_prob_error = mean(exp(|d|)); *_seq_mult_prob_error is computed in the same way for each sequence with tokens.
--   gen_kl_error = mean of k3 = exp(d) - 1 - d; policy_kl_error is the same for -d. With k1, they are the means of -d and d;
--   with k2, of d^2 / 2.
--   js_divergence_error = mean of k3(a, m) / 2 + k3(b, m) / 2, where m is the mean of both probabilities.
--   sampling_importance_ratio = mean of exp(d), not truncated, where infinities and NaN become 0. At sequence level, it is
--   the mean of exp(sum of d) over all sequences, times train_micro_batch_size, because NeMo-RL multiplies the weights of a
--   micro-batch by the mask of each of its sequences.
--   approx_entropy = -mean(exp(current - b) * current). probs_ratio = mean of exp(current - a); at sequence level, of exp(mean
--   of current - a); with disable_ppo_ratio, of current. probs_ratio_clamped is the same, clamped to 1 - ratio_clip_min and
--   1 + ratio_clip_max. All of these are NULL without the `current` pass. For the smallest and largest ratio, NeMo-RL ignores
--   micro-batches in which it is infinite, and logs -1 if none is left; here, this applies to sequences.
-- NeMo-RL multiplies by the mask; here, masked tokens are left out regardless of their logprob. One exception: a sequence
-- ratio is 0 if the logprob of any token, even a masked one, is NaN or infinite (NaN * 0 is NaN, which NeMo-RL replaces by 0).

CREATE OR REPLACE MACRO nemo_rl_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprob_a::DOUBLE AS prev, logprob_b::DOUBLE AS generation, d,
           expm1_minus(d) AS k3, expm1_minus(-d) AS k3_reverse
    FROM counted_pair(a, b);

-- exp(x), or 0 if that is not finite.
CREATE OR REPLACE MACRO nemo_rl_ratio(x) AS CASE WHEN isfinite(exp(x)) THEN exp(x) ELSE 0.0 END;

-- log((exp(x) + exp(y)) / 2), computed from the larger to avoid overflow.
CREATE OR REPLACE MACRO nemo_rl_mixture(x, y) AS
    CASE WHEN isfinite(greatest(x, y)) THEN greatest(x, y) + ln(0.5 + 0.5 * exp(-abs(x - y))) ELSE x + y END;

-- nemo_rl_rows(...): per-sequence sums.
CREATE OR REPLACE MACRO nemo_rl_rows(a, b, kl_type, of_sequences) AS TABLE
    SELECT run, step, seq_id, coalesce(num_tokens, 0) AS num_tokens,
           sum_mult, sum_mult / num_tokens AS mean_mult, sum_gen, sum_policy, sum_js,
           CASE WHEN NOT of_sequences THEN coalesce(sum_ratio, 0.0)
                WHEN is_lost THEN 0.0
                ELSE nemo_rl_ratio(coalesce(sum_d, 0.0)) END AS weight
    FROM pair_keys(a, b, NULL, NULL, NULL)
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens,
               sum(exp(abs(d))) AS sum_mult,
               sum(CASE kl_type WHEN 'k1' THEN -d WHEN 'k2' THEN d * d / 2 ELSE k3 END) AS sum_gen,
               sum(CASE kl_type WHEN 'k1' THEN d WHEN 'k2' THEN d * d / 2 ELSE k3_reverse END) AS sum_policy,
               sum(0.5 * expm1_minus(prev - nemo_rl_mixture(prev, generation))
                   + 0.5 * expm1_minus(generation - nemo_rl_mixture(prev, generation))) AS sum_js,
               sum(nemo_rl_ratio(d)) AS sum_ratio, sum(d) AS sum_d
        FROM nemo_rl_tokens(a, b)
        GROUP BY ALL
    ) USING (run, step, seq_id, iteration_a, iteration_b)
    LEFT JOIN (
        SELECT DISTINCT run, step, seq_id, iteration_a, iteration_b, true AS is_lost
        FROM pair(a, b)
        WHERE of_sequences AND NOT mask AND NOT isfinite(d)
    ) USING (run, step, seq_id, iteration_a, iteration_b);

-- nemo_rl_ratios(...): per-sequence statistics of the ratios in the loss.
CREATE OR REPLACE MACRO nemo_rl_ratios(a, of_sequences, clip_min, clip_max, disabled) AS TABLE
    SELECT run, step, seq_id, num_tokens,
           coalesce(num_tokens * whole, sum_ratio) AS sum_ratio, coalesce(whole, min_ratio) AS min_ratio,
           coalesce(whole, max_ratio) AS max_ratio, coalesce(num_tokens * whole_clamped, sum_clamped) AS sum_clamped,
           coalesce(whole_clamped, min_clamped) AS min_clamped, coalesce(whole_clamped, max_clamped) AS max_clamped
    FROM (
        -- whole: the ratio of the sequence, or NULL if ratios are those of tokens.
        SELECT run, step, seq_id, count(*) AS num_tokens, CASE WHEN of_sequences AND NOT disabled THEN exp(avg(d)) END AS whole,
               CASE WHEN whole IS NOT NULL THEN torch_clamp(whole, 1 - clip_min, 1 + clip_max) END AS whole_clamped,
               sum(ratio) AS sum_ratio, torch_min(ratio) AS min_ratio, torch_max(ratio) AS max_ratio,
               sum(clamped) AS sum_clamped, torch_min(clamped) AS min_clamped, torch_max(clamped) AS max_clamped
        FROM (
            SELECT *, CASE WHEN disabled THEN prev ELSE exp(d) END AS ratio,
                   CASE WHEN disabled THEN ratio ELSE torch_clamp(ratio, 1 - clip_min, 1 + clip_max) END AS clamped
            FROM nemo_rl_tokens('current', a)
        )
        GROUP BY run, step, seq_id, iteration_a, iteration_b
    );

-- nemo_rl_entropies(...): per-sequence sums of the approximate entropy.
CREATE OR REPLACE MACRO nemo_rl_entropies(b) AS TABLE
    SELECT run, step, seq_id, count(*) AS num_tokens, sum(exp(d) * prev) AS sum_entropy
    FROM nemo_rl_tokens('current', b)
    GROUP BY run, step, seq_id, iteration_a, iteration_b;

CREATE OR REPLACE MACRO nemo_rl_finite(x) AS CASE WHEN NOT isinf(x) THEN x END;

CREATE OR REPLACE MACRO nemo_rl_numbers(
    a, b, by_step, kl_type, of_sequences, micro_batch, clip_min, clip_max, disabled
) AS TABLE
    SELECT found.run, found.step, token_mult_prob_error, gen_kl_error, policy_kl_error, js_divergence_error,
           sampling_importance_ratio, approx_entropy,
           max_seq_mult_prob_error, mean_seq_mult_prob_error, min_seq_mult_prob_error,
           probs_ratio, probs_ratio_min, probs_ratio_max,
           probs_ratio_clamped, probs_ratio_clamped_min, probs_ratio_clamped_max
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(num_tokens) AS num_tokens,
               sum(sum_mult) / nullif(sum(num_tokens), 0) AS token_mult_prob_error,
               sum(sum_gen) / nullif(sum(num_tokens), 0) AS gen_kl_error,
               sum(sum_policy) / nullif(sum(num_tokens), 0) AS policy_kl_error,
               sum(sum_js) / nullif(sum(num_tokens), 0) AS js_divergence_error,
               CASE WHEN of_sequences THEN sum(weight) / count(*) * micro_batch
                    ELSE sum(weight) / nullif(sum(num_tokens), 0) END AS sampling_importance_ratio,
               torch_max(mean_mult) AS max_seq_mult_prob_error, avg(mean_mult) AS mean_seq_mult_prob_error,
               torch_min(mean_mult) AS min_seq_mult_prob_error
        FROM nemo_rl_rows(a, b, kl_type, of_sequences)
        GROUP BY ALL
    ) AS found
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, -sum(sum_entropy) / sum(num_tokens) AS approx_entropy
        FROM nemo_rl_entropies(b)
        GROUP BY ALL
    ) AS currently ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(sum_ratio) / sum(num_tokens) AS probs_ratio,
               coalesce(torch_min(nemo_rl_finite(min_ratio)), -1.0) AS probs_ratio_min,
               coalesce(torch_max(nemo_rl_finite(max_ratio)), -1.0) AS probs_ratio_max,
               sum(sum_clamped) / sum(num_tokens) AS probs_ratio_clamped,
               coalesce(torch_min(nemo_rl_finite(min_clamped)), -1.0) AS probs_ratio_clamped_min,
               coalesce(torch_max(nemo_rl_finite(max_clamped)), -1.0) AS probs_ratio_clamped_max
        FROM nemo_rl_ratios(a, of_sequences, clip_min, clip_max, disabled)
        GROUP BY ALL
    ) AS ratios ON ratios.run = found.run AND ratios.step IS NOT DISTINCT FROM found.step
    WHERE num_tokens > 0
    ORDER BY found.run, found.step;
