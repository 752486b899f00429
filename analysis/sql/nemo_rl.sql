-- The numbers of NeMo-RL 0.7.0: ClippedPGLossFn of nemo_rl/algorithms/loss/loss_functions.py and
-- compute_and_apply_seq_logprob_error_masking of nemo_rl/algorithms/grpo.py. Pass a is the trainer (prev_logprobs), b the
-- generation; d = a - b. Means are over the tokens that count in the loss, of all sequences.
--   token_mult_prob_error = mean(exp(|d|)); *_seq_mult_prob_error the same of each sequence that has a token.
--   gen_kl_error = mean of k3 = exp(d) - 1 - d, policy_kl_error that of -d; as k1 they are -d and d, as k2 d^2 / 2.
--   js_divergence_error = mean of half the k3 of a against m and half that of b, m = half of both probabilities.
--   sampling_importance_ratio = mean of exp(d), cut or masked by the truncation, infinities and NaN taken as 0; at sequence
--   level that of exp(sum of d) over all sequences, times train_micro_batch_size: NeMo-RL multiplies the weights of a
--   micro-batch by each of its sequences' masks. is_oob_ratio = share of tokens outside of the bounds; of seq-mask-tis
--   that of sequences whose exp(mean of d) is.
--   approx_entropy = -mean(exp(current - b) * current), NULL without the pass current.

CREATE OR REPLACE MACRO nemo_rl_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprob_a::DOUBLE AS prev, logprob_b::DOUBLE AS generation, d,
           expm1_minus(d) AS k3, expm1_minus(-d) AS k3_reverse
    FROM pair(a, b)
    WHERE mask AND d IS NOT NULL;

-- exp(x), 0 where that is no number.
CREATE OR REPLACE MACRO nemo_rl_ratio(x) AS CASE WHEN isfinite(exp(x)) THEN exp(x) ELSE 0.0 END;

-- log(exp(x) + exp(y)) - log 2, of the larger and what the smaller adds.
CREATE OR REPLACE MACRO nemo_rl_mixture(x, y) AS
    CASE WHEN isfinite(greatest(x, y)) THEN greatest(x, y) + ln(0.5 + 0.5 * exp(-abs(x - y))) ELSE x + y END;

CREATE OR REPLACE MACRO nemo_rl_cut(ratio, kind, upper, lower) AS
    CASE WHEN kind = 'tis' THEN torch_clamp(ratio, coalesce(lower, 0.0), upper)
         WHEN kind = 'icepop' AND (ratio < lower OR ratio > upper) THEN 0.0
         ELSE ratio END;

-- nemo_rl_rows(...): what each sequence adds.
CREATE OR REPLACE MACRO nemo_rl_rows(a, b, kl_type, of_sequences, kind, upper, lower) AS TABLE
    SELECT *,
           CASE WHEN of_sequences THEN nemo_rl_cut(sequence_ratio, kind, upper, lower)
                WHEN kind = 'seq-mask-tis' AND NOT inside THEN 0.0
                ELSE sum_ratio END AS weight,
           CASE WHEN kind = 'seq-mask-tis' THEN (NOT inside)::INTEGER
                WHEN of_sequences
                THEN num_tokens * (sequence_ratio < coalesce(lower, 0.0) OR sequence_ratio > upper)::INTEGER
                ELSE num_oob END AS oob
    FROM (
        SELECT run, step, seq_id, coalesce(num_tokens, 0) AS num_tokens,
               sum_mult, sum_mult / num_tokens AS mean_mult, sum_gen, sum_policy, sum_js,
               coalesce(sum_ratio, 0.0) AS sum_ratio, coalesce(num_oob, 0) AS num_oob,
               nemo_rl_ratio(coalesce(sum_d, 0.0)) AS sequence_ratio,
               coalesce(exp(mean_finite_d), 1.0) BETWEEN lower AND upper AS inside
        FROM pair_keys(a, b, NULL, NULL, NULL)
        LEFT JOIN (
            SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens,
                   sum(exp(abs(d))) AS sum_mult,
                   sum(CASE kl_type WHEN 'k1' THEN -d WHEN 'k2' THEN d * d / 2 ELSE k3 END) AS sum_gen,
                   sum(CASE kl_type WHEN 'k1' THEN d WHEN 'k2' THEN d * d / 2 ELSE k3_reverse END) AS sum_policy,
                   sum(0.5 * expm1_minus(prev - nemo_rl_mixture(prev, generation))
                       + 0.5 * expm1_minus(generation - nemo_rl_mixture(prev, generation))) AS sum_js,
                   sum(nemo_rl_cut(nemo_rl_ratio(d), kind, upper, lower)) AS sum_ratio,
                   count(*) FILTER (nemo_rl_ratio(d) < coalesce(lower, 0.0) OR nemo_rl_ratio(d) > upper) AS num_oob,
                   sum(d) AS sum_d,
                   avg(CASE WHEN isfinite(d) THEN d ELSE 0.0 END) AS mean_finite_d
            FROM nemo_rl_tokens(a, b)
            GROUP BY ALL
        ) USING (run, step, seq_id, iteration_a, iteration_b)
    );

CREATE OR REPLACE MACRO nemo_rl_groups(a, b, by_step, kl_type, of_sequences, kind, upper, lower, micro_batch) AS TABLE
    SELECT found.run, found.step, token_mult_prob_error, gen_kl_error, policy_kl_error, js_divergence_error,
           sampling_importance_ratio, is_oob_ratio, approx_entropy,
           max_seq_mult_prob_error, mean_seq_mult_prob_error, min_seq_mult_prob_error
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(num_tokens) AS num_tokens,
               sum(sum_mult) / sum(num_tokens) AS token_mult_prob_error,
               sum(sum_gen) / sum(num_tokens) AS gen_kl_error,
               sum(sum_policy) / sum(num_tokens) AS policy_kl_error,
               sum(sum_js) / sum(num_tokens) AS js_divergence_error,
               CASE WHEN of_sequences THEN sum(weight) / count(*) * micro_batch
                    ELSE sum(weight) / sum(num_tokens) END AS sampling_importance_ratio,
               CASE WHEN kind IS NOT NULL
                    THEN sum(oob) / CASE kind WHEN 'seq-mask-tis' THEN count(*) ELSE sum(num_tokens) END END
                   AS is_oob_ratio,
               torch_max(mean_mult) AS max_seq_mult_prob_error,
               avg(mean_mult) AS mean_seq_mult_prob_error,
               torch_min(mean_mult) AS min_seq_mult_prob_error
        FROM nemo_rl_rows(a, b, kl_type, of_sequences, kind, upper, lower)
        GROUP BY ALL
    ) AS found
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, -avg(exp(d) * prev) AS approx_entropy
        FROM nemo_rl_tokens('current', b)
        GROUP BY ALL
    ) AS currently ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    WHERE num_tokens > 0
    ORDER BY found.run, found.step;

CREATE OR REPLACE MACRO nemo_rl_steps(
    a, b, reference_policy_kl_type := 'k3', sequence_level_importance_ratios := false,
    truncated_importance_sampling_type := NULL, truncated_importance_sampling_ratio := NULL,
    truncated_importance_sampling_ratio_min := NULL,
    train_micro_batch_size := 1
) AS TABLE
    SELECT * FROM nemo_rl_groups(a, b, true, reference_policy_kl_type, sequence_level_importance_ratios,
                                 truncated_importance_sampling_type::VARCHAR, truncated_importance_sampling_ratio::DOUBLE,
                                 truncated_importance_sampling_ratio_min::DOUBLE, train_micro_batch_size);

CREATE OR REPLACE MACRO nemo_rl_runs(
    a, b, reference_policy_kl_type := 'k3', sequence_level_importance_ratios := false,
    truncated_importance_sampling_type := NULL, truncated_importance_sampling_ratio := NULL,
    truncated_importance_sampling_ratio_min := NULL,
    train_micro_batch_size := 1
) AS TABLE
    SELECT * EXCLUDE (step)
    FROM nemo_rl_groups(a, b, false, reference_policy_kl_type, sequence_level_importance_ratios,
                        truncated_importance_sampling_type::VARCHAR, truncated_importance_sampling_ratio::DOUBLE,
                        truncated_importance_sampling_ratio_min::DOUBLE, train_micro_batch_size);
