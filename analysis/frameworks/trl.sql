-- TRL 1.16.0's metrics. Pass a is the trainer (old_per_token_logps), pass b vLLM (sampling_per_token_logps), over unmasked
-- tokens.
-- Mismatch, following _generate_and_score_completions of trl/trainer/grpo_trainer.py; d = a - b:
--   sampling_logp_difference: mean and maximum of |d| over tokens with logprobs; 0 if there are none.
--   importance_sampling_ratio: minimum, mean and maximum of exp(d) over tokens, or of exp(sum of d) over sequences; ratios
--   outside the bounds are clamped (truncate) or set to 0 (mask). A token without a logprob has d = 0; a sequence without
--   tokens has a ratio of 1.
-- Loss, following _compute_loss of grpo_trainer.py and rloo_trainer.py; NULL without the `current` pass or advantages:
--   the ratio is exp(current - a) of a token; with importance_sampling_level sequence, exp of a sequence's mean of current - a;
--   with trainer rloo, exp of its sum. Ratios are capped at delta. A ratio is clipped low if it is below 1 - epsilon and the
--   advantage is negative, and clipped high if it is above 1 + epsilon_high and the advantage is positive. clip_ratio/*_mean
--   is the share of tokens (or sequences), low_min and high_max the smallest and largest share of a sequence. If all responses
--   of a micro-batch are one token long, TRL's shares include masked tokens; here, they do not.
--   cispo_clip_ratio: share of ratios above epsilon_high with a positive advantage.
-- Here, one step is one batch. With logging_steps, a row is what TRL logs over that many steps: the mean of the generation
-- batches' mismatch, where each batch is a mean over processes, and the mean of the micro-batches' loss metrics.

-- Infinities become the largest float32, and NaN 0, as nan_to_num does.
CREATE OR REPLACE MACRO trl_finite(d) AS
    CASE WHEN isnan(d) THEN 0.0 WHEN isinf(d) THEN sign(d) * 3.4028234663852886e38::DOUBLE ELSE d END;

-- trl_bounded(...): the ratio used by the loss.
CREATE OR REPLACE MACRO trl_bounded(ratio, mode, clip_max, clip_min) AS
    CASE WHEN mode IN ('token_truncate', 'sequence_truncate') THEN greatest(least(ratio, clip_max), coalesce(clip_min, 0.0))
         WHEN mode NOT IN ('token_mask', 'sequence_mask')
         THEN error('vllm_importance_sampling_mode: token_truncate, token_mask, sequence_truncate or sequence_mask')
         WHEN ratio < coalesce(clip_min, 0.0) OR ratio > clip_max THEN 0.0
         ELSE ratio END;

-- trl_rows(...): sums of each sequence, from which TRL's mismatch metrics are computed, and the process that recorded it.
CREATE OR REPLACE MACRO trl_rows(a, b, mode, clip_max, clip_min) AS TABLE
    SELECT run, step, seq_id, writer, coalesce(num_tokens, 0) AS num_tokens, num_known, sum_abs_d, max_abs_d,
           CASE WHEN of_tokens THEN coalesce(num_tokens, 0) ELSE 1 END AS num_ratios,
           CASE WHEN of_tokens THEN sum_ratio ELSE ratio END AS sum_ratio,
           CASE WHEN of_tokens THEN min_ratio ELSE ratio END AS min_ratio,
           CASE WHEN of_tokens THEN max_ratio ELSE ratio END AS max_ratio
    FROM (
        SELECT *, mode LIKE 'token%' AS of_tokens,
               trl_bounded(exp(coalesce(sum_d, 0.0)), mode, clip_max, clip_min) AS ratio
        FROM pair_keys(a, b, NULL, NULL, NULL)
        JOIN (SELECT run, step, seq_id, writer FROM sequences) USING (run, step, seq_id)
        LEFT JOIN (
            SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens,
                   count(*) FILTER (NOT isnan(d)) AS num_known, sum(abs(d)) FILTER (NOT isnan(d)) AS sum_abs_d,
                   max(abs(d)) FILTER (NOT isnan(d)) AS max_abs_d, sum(trl_finite(d)) AS sum_d,
                   sum(bounded) AS sum_ratio, min(bounded) AS min_ratio, max(bounded) AS max_ratio
            FROM (
                SELECT * REPLACE (coalesce(d, 'NaN'::DOUBLE) AS d),
                       trl_bounded(exp(trl_finite(coalesce(d, 'NaN'::DOUBLE))), mode, clip_max, clip_min) AS bounded
                FROM pair(a, b)
                WHERE mask
            )
            GROUP BY ALL
        ) USING (run, step, seq_id, iteration_a, iteration_b)
    );

-- The step at which TRL logs the values of a given step.
CREATE OR REPLACE MACRO trl_logged_at(step, logging_steps, logging_first_step) AS
    CASE WHEN logging_first_step AND step = 1 THEN 1 ELSE ((step + logging_steps - 1) // logging_steps * logging_steps) END;

-- trl_sampling(...): the mismatch metrics, one row per step, per run with step NULL, or per logged step.
CREATE OR REPLACE MACRO trl_sampling(a, b, by_step, mode, clip_max, clip_min, logging_steps, logging_first_step) AS TABLE
    SELECT run, trl_logged_at(batch, coalesce(logging_steps, 1), logging_first_step) AS step, sum(num_tokens) AS num_tokens,
           avg(mean_diff) AS mean_diff, avg(max_diff) AS max_diff,
           avg(min_ratio) AS min_ratio, avg(mean_ratio) AS mean_ratio, avg(max_ratio) AS max_ratio
    FROM (
        SELECT run, batch, sum(num_tokens) AS num_tokens, avg(mean_diff) AS mean_diff, max(max_diff) AS max_diff,
               min(min_ratio) AS min_ratio, avg(mean_ratio) AS mean_ratio, max(max_ratio) AS max_ratio
        FROM (
            SELECT run, CASE WHEN by_step THEN step END AS batch,
                   CASE WHEN logging_steps IS NOT NULL THEN writer END AS process,
                   sum(num_tokens) AS num_tokens,
                   coalesce(sum(sum_abs_d) / nullif(sum(num_known), 0), 0.0) AS mean_diff,
                   coalesce(max(max_abs_d), 0.0) AS max_diff, coalesce(min(min_ratio), 0.0) AS min_ratio,
                   coalesce(sum(sum_ratio) / nullif(sum(num_ratios), 0), 0.0) AS mean_ratio,
                   coalesce(max(max_ratio), 0.0) AS max_ratio
            FROM trl_rows(a, b, mode, clip_max, clip_min)
            GROUP BY ALL
        )
        GROUP BY run, batch
    )
    GROUP BY ALL;

-- trl_updates(a): one row per use of a sequence by the loss, with the keys of its update and micro-batch.
-- If `a` is the `current` pass, each use is paired with itself.
CREATE OR REPLACE MACRO trl_updates(a) AS TABLE
    SELECT s.run, s.step, s.seq_id, s.advantage, now.iteration, coalesce(now.policy_version + 1, s.step) AS update,
           now.forward_id
    FROM sequences AS s
    JOIN scores AS now ON now.run = s.run AND now.step = s.step AND now.seq_id = s.seq_id
    JOIN scores AS old ON old.run = s.run AND old.step = s.step AND old.seq_id = s.seq_id
    WHERE now."pass" = 'current' AND now.logprobs IS NOT NULL AND old."pass" = a AND old.logprobs IS NOT NULL
      AND (a <> 'current' OR now.iteration = old.iteration);

-- trl_capped(...): the ratio capped at delta; NaN stays NaN.
CREATE OR REPLACE MACRO trl_capped(ratio, delta) AS
    CASE WHEN isnan(ratio) OR delta IS NULL THEN ratio ELSE least(ratio, delta) END;

-- trl_clips(...): number of clipped ratios per use.
CREATE OR REPLACE MACRO trl_clips(a, of_rloo, level, epsilon_low, epsilon_high, delta) AS TABLE
    SELECT run, step, seq_id, update, forward_id,
           CASE WHEN of_tokens THEN coalesce(num_tokens, 0) ELSE 1 END AS num_ratios,
           CASE WHEN of_tokens THEN coalesce(num_unknown, 0) ELSE (advantage IS NULL)::INTEGER END AS num_unknown,
           CASE WHEN of_tokens THEN coalesce(num_low, 0)
                ELSE (below(ratio, 1 - epsilon_low) AND below(advantage, 0))::INTEGER END AS num_low,
           CASE WHEN of_tokens THEN coalesce(num_high, 0)
                ELSE (above(ratio, 1 + epsilon_high) AND above(advantage, 0))::INTEGER END AS num_high,
           CASE WHEN of_tokens THEN coalesce(num_cispo, 0)
                ELSE (above(uncapped, epsilon_high) AND above(advantage, 0))::INTEGER END AS num_cispo
    FROM (
        SELECT *,
               CASE level WHEN 'token' THEN NOT of_rloo WHEN 'sequence' THEN false
                          ELSE error('importance_sampling_level: token or sequence') END AS of_tokens,
               trl_capped(exp(coalesce(CASE WHEN of_rloo THEN sum_d ELSE mean_d END, 0.0)), delta) AS ratio,
               exp(coalesce(CASE WHEN of_rloo THEN sum_d ELSE mean_d END, 0.0)) AS uncapped
        FROM trl_updates(a)
        LEFT JOIN (
            SELECT run, step, seq_id, iteration_a AS iteration, count(*) AS num_tokens, sum(d) AS sum_d, avg(d) AS mean_d,
                   count(*) FILTER (advantage IS NULL) AS num_unknown,
                   count(*) FILTER (below(trl_capped(exp(d), delta), 1 - epsilon_low) AND below(advantage, 0)) AS num_low,
                   count(*) FILTER (above(trl_capped(exp(d), delta), 1 + epsilon_high) AND above(advantage, 0)) AS num_high,
                   count(*) FILTER (above(exp(d), epsilon_high) AND above(advantage, 0)) AS num_cispo
            FROM counted_pair('current', a)
            GROUP BY run, step, seq_id, iteration_a
        ) USING (run, step, seq_id, iteration)
    );

-- trl_clipping(...): the loss metrics, one row per step, per run with step NULL, or per logged step.
CREATE OR REPLACE MACRO trl_clipping(
    a, by_step, of_rloo, level, epsilon_low, epsilon_high, delta, logging_steps, logging_first_step
) AS TABLE
    SELECT run, trl_logged_at(batch, coalesce(logging_steps, 1), logging_first_step) AS step,
           avg(num_low / greatest(num_ratios, 1)) FILTER (is_known) AS low_mean,
           avg(low_min) FILTER (is_known) AS low_min,
           avg(num_high / greatest(num_ratios, 1)) FILTER (is_known) AS high_mean,
           avg(high_max) FILTER (is_known) AS high_max,
           avg((num_low + num_high) / greatest(num_ratios, 1)) FILTER (is_known) AS region_mean,
           avg(num_cispo / greatest(num_ratios, 1)) FILTER (is_known) AS cispo
    FROM (
        SELECT run, CASE WHEN logging_steps IS NOT NULL THEN update WHEN by_step THEN step END AS batch,
               CASE WHEN logging_steps IS NOT NULL THEN forward_id END AS micro_batch, sum(num_unknown) = 0 AS is_known,
               sum(num_ratios) AS num_ratios, sum(num_low) AS num_low, sum(num_high) AS num_high, sum(num_cispo) AS num_cispo,
               min(num_low / nullif(num_ratios, 0)) AS low_min, max(num_high / nullif(num_ratios, 0)) AS high_max
        FROM trl_clips(a, of_rloo, level, epsilon_low, epsilon_high, delta)
        GROUP BY ALL
    )
    GROUP BY ALL;

-- True if the loss clips on both sides, false if it clips on one side, NULL if it does not clip.
CREATE OR REPLACE MACRO trl_clips_both(of_rloo, loss_type) AS
    CASE WHEN of_rloo OR loss_type IN ('grpo', 'dr_grpo', 'dapo', 'bnpo', 'luspo') THEN true
         WHEN loss_type = 'cispo' THEN false
         WHEN loss_type NOT IN ('sapo', 'vespo') THEN error('loss_type: grpo, dr_grpo, dapo, bnpo, luspo, cispo, sapo or vespo')
    END;

-- trl_groups(...): the mismatch and loss metrics side by side; NULL if TRL does not log them. The last row of a run may
-- cover fewer than logging_steps steps; its step is the last step.
CREATE OR REPLACE MACRO trl_groups(
    a, b, by_step, mode, clip_max, clip_min, of_rloo, loss_type, level, epsilon_low, epsilon_high, delta,
    logging_steps, logging_first_step
) AS TABLE
    SELECT run, CASE WHEN logging_steps IS NULL THEN step ELSE least(step, last_step) END AS step,
           CASE WHEN NOT of_rloo THEN mean_diff END AS "sampling/sampling_logp_difference/mean",
           CASE WHEN NOT of_rloo THEN max_diff END AS "sampling/sampling_logp_difference/max",
           CASE WHEN NOT of_rloo THEN min_ratio END AS "sampling/importance_sampling_ratio/min",
           CASE WHEN NOT of_rloo THEN mean_ratio END AS "sampling/importance_sampling_ratio/mean",
           CASE WHEN NOT of_rloo THEN max_ratio END AS "sampling/importance_sampling_ratio/max",
           CASE WHEN trl_clips_both(of_rloo, loss_type) THEN low_mean END AS "clip_ratio/low_mean",
           CASE WHEN trl_clips_both(of_rloo, loss_type) THEN low_min END AS "clip_ratio/low_min",
           CASE WHEN trl_clips_both(of_rloo, loss_type) THEN high_mean END AS "clip_ratio/high_mean",
           CASE WHEN trl_clips_both(of_rloo, loss_type) THEN high_max END AS "clip_ratio/high_max",
           CASE WHEN trl_clips_both(of_rloo, loss_type) THEN region_mean END AS "clip_ratio/region_mean",
           CASE WHEN NOT trl_clips_both(of_rloo, loss_type) THEN cispo END AS cispo_clip_ratio
    FROM (
        SELECT coalesce(sampling.run, clipping.run) AS run, coalesce(sampling.step, clipping.step) AS step, *
               EXCLUDE (run, step)
        FROM trl_sampling(a, b, by_step, mode, clip_max, clip_min, logging_steps, logging_first_step) AS sampling
        FULL JOIN trl_clipping(a, by_step, of_rloo, level, epsilon_low, epsilon_high, delta, logging_steps,
                               logging_first_step) AS clipping
               ON clipping.run = sampling.run AND clipping.step IS NOT DISTINCT FROM sampling.step
        WHERE logging_steps IS NOT NULL OR num_tokens IS NULL OR num_tokens > 0
    )
    LEFT JOIN (
        SELECT run, max(step) AS last_step
        FROM (SELECT run, step FROM sequences UNION ALL SELECT run, update FROM trl_updates(a))
        GROUP BY run
    ) USING (run)
    ORDER BY run, step;

-- trl_numbers(...): trl_groups, called with TRL's own options. A whole run is treated as one batch regardless of logging_steps.
CREATE OR REPLACE MACRO trl_numbers(a, b, by_step, mode, clip_max, clip_min, trainer, loss_type, level, epsilon, epsilon_high, delta,
                                    logging_steps, logging_first_step) AS TABLE
    SELECT * FROM trl_groups(
        a, b, by_step, mode, clip_max, clip_min,
        CASE trainer WHEN 'grpo' THEN false WHEN 'rloo' THEN true ELSE error('trainer: grpo or rloo') END,
        loss_type, level, epsilon, coalesce(epsilon_high, epsilon), delta,
        CASE WHEN by_step THEN logging_steps::BIGINT END, by_step AND logging_first_step
    );
