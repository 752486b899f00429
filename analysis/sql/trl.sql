-- The numbers of TRL 1.16.0, _generate_and_score_completions of trl/trainer/grpo_trainer.py. Pass a is the trainer
-- (old_per_token_logps), b vLLM (sampling_per_token_logps); d = a - b over the tokens that count in the loss.
--   sampling_logp_difference: mean and largest |d| of the tokens, those without a logprob left out; 0 if all are.
--   importance_sampling_ratio: smallest, mean and largest exp(d) of the tokens, or exp(sum of d) of the sequences; what lies
--   outside of the bounds is cut to them (truncate) or becomes 0 (mask). A token without a logprob has d = 0, a sequence
--   without a token the ratio 1.
-- TRL takes a mean over the processes' means; here a step is the batch of one process.

-- trl_tokens(a, b): d of each token that counts, NaN where a logprob is missing.
CREATE OR REPLACE MACRO trl_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, coalesce(d, 'NaN'::DOUBLE) AS d
    FROM pair(a, b)
    WHERE mask;

-- Infinities become the largest float32, and NaN 0, as nan_to_num does.
CREATE OR REPLACE MACRO trl_finite(d) AS
    CASE WHEN isnan(d) THEN 0.0 WHEN isinf(d) THEN sign(d) * 3.4028234663852886e38::DOUBLE ELSE d END;

-- trl_ratios(...): the ratio of each token, or of each sequence, as the loss uses it.
CREATE OR REPLACE MACRO trl_ratios(a, b, mode, clip_max, clip_min) AS TABLE
    SELECT run, step,
           CASE WHEN mode IN ('token_truncate', 'sequence_truncate')
                THEN greatest(least(ratio, clip_max), coalesce(clip_min, 0.0))
                WHEN mode NOT IN ('token_mask', 'sequence_mask')
                THEN error('vllm_importance_sampling_mode: token_truncate, token_mask, sequence_truncate or sequence_mask')
                WHEN ratio < coalesce(clip_min, 0.0) OR ratio > clip_max THEN 0.0
                ELSE ratio END AS ratio
    FROM (
        SELECT run, step, exp(trl_finite(d)) AS ratio
        FROM trl_tokens(a, b)
        WHERE mode LIKE 'token%'
        UNION ALL
        SELECT run, step, exp(coalesce(sum_d, 0.0))
        FROM pair_keys(a, b, NULL, NULL, NULL)
        LEFT JOIN (
            SELECT run, step, seq_id, iteration_a, iteration_b, sum(trl_finite(d)) AS sum_d
            FROM trl_tokens(a, b)
            GROUP BY ALL
        ) USING (run, step, seq_id, iteration_a, iteration_b)
        WHERE mode NOT LIKE 'token%'
    );

-- trl_groups(...): a row a step, or a run with step NULL.
CREATE OR REPLACE MACRO trl_groups(a, b, by_step, mode, clip_max, clip_min) AS TABLE
    SELECT run, tokens.step AS step, mean_diff AS "sampling/sampling_logp_difference/mean", max_diff AS "sampling/sampling_logp_difference/max",
           min_ratio AS "sampling/importance_sampling_ratio/min", mean_ratio AS "sampling/importance_sampling_ratio/mean",
           max_ratio AS "sampling/importance_sampling_ratio/max"
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step,
               coalesce(avg(abs(d)) FILTER (NOT isnan(d)), 0.0) AS mean_diff,
               coalesce(max(abs(d)) FILTER (NOT isnan(d)), 0.0) AS max_diff
        FROM trl_tokens(a, b)
        GROUP BY ALL
    ) AS tokens
    JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step,
               min(ratio) AS min_ratio, avg(ratio) AS mean_ratio, max(ratio) AS max_ratio
        FROM trl_ratios(a, b, mode, clip_max, clip_min)
        GROUP BY ALL
    ) AS ratios USING (run)
    WHERE tokens.step IS NOT DISTINCT FROM ratios.step
    ORDER BY run, step;

CREATE OR REPLACE MACRO trl_steps(
    a, b, vllm_importance_sampling_mode := 'sequence_mask', vllm_importance_sampling_clip_max := 3.0,
    vllm_importance_sampling_clip_min := NULL
) AS TABLE
    SELECT * FROM trl_groups(a, b, true, vllm_importance_sampling_mode, vllm_importance_sampling_clip_max::DOUBLE,
                             vllm_importance_sampling_clip_min::DOUBLE);

CREATE OR REPLACE MACRO trl_runs(
    a, b, vllm_importance_sampling_mode := 'sequence_mask', vllm_importance_sampling_clip_max := 3.0,
    vllm_importance_sampling_clip_min := NULL
) AS TABLE
    SELECT * EXCLUDE (step) FROM trl_groups(a, b, false, vllm_importance_sampling_mode,
                                            vllm_importance_sampling_clip_max::DOUBLE,
                                            vllm_importance_sampling_clip_min::DOUBLE);
