-- What the mismatch does to an objective, a token a row: d = train - rollout, drift = current - train (nats), rho* = exp(d + drift).
-- The options are those of schemas.loss.Loss, with the same names and defaults; `now` is the pass inside the loss, which is
-- 'current', or 'train' where that was not recorded.

-- loss_term(...): f_A(ratio), what a token adds to the objective.
CREATE OR REPLACE MACRO loss_term(
    ratio, advantage, kind := 'ppo_clip', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL
) AS CASE kind
    WHEN 'ppo_clip' THEN least(least(ratio, coalesce(clip_hard, 'inf'::DOUBLE)) * advantage,
                               greatest(least(ratio, 1 + clip_high), 1 - clip_low) * advantage)
    WHEN 'reinforce' THEN ratio * advantage
    WHEN 'cispo' THEN least(ratio, clip_high) * advantage
    ELSE error('kind: ppo_clip, reinforce or cispo') END;

-- loss_clips(...): whether the ratio is beyond the bound that holds for the sign of the advantage.
CREATE OR REPLACE MACRO loss_clips(
    ratio, advantage, kind := 'ppo_clip', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL
) AS CASE kind
    WHEN 'ppo_clip' THEN (advantage > 0 AND ratio > least(1 + clip_high, coalesce(clip_hard, 'inf'::DOUBLE)))
                         OR (advantage < 0 AND (ratio < 1 - clip_low OR ratio > coalesce(clip_hard, 'inf'::DOUBLE)))
    WHEN 'cispo' THEN advantage <> 0 AND ratio > clip_high
    ELSE false END;

-- clamped_exp(x): exp of a log-ratio, which is clamped to 20 nats either way.
CREATE OR REPLACE MACRO clamped_exp(x) AS exp(greatest(least(x, 20.0), -20.0));

-- correction_weight(...): what the loss's correction multiplies a token's term by; log_ratio is d, of the token or the sequence.
CREATE OR REPLACE MACRO correction_weight(log_ratio, correction, correction_low, correction_high) AS
    CASE WHEN correction = 'none' THEN 1.0
         WHEN correction IN ('token_truncate', 'sequence_truncate')
         THEN greatest(least(clamped_exp(log_ratio), coalesce(correction_high, 'inf'::DOUBLE)), coalesce(correction_low, 0.0))
         WHEN correction NOT IN ('token_mask', 'sequence_mask')
         THEN error('correction: none, token_truncate, token_mask, sequence_truncate or sequence_mask')
         WHEN clamped_exp(log_ratio) BETWEEN coalesce(correction_low, 0.0) AND coalesce(correction_high, 'inf'::DOUBLE)
         THEN clamped_exp(log_ratio)
         ELSE 0.0 END;

-- objective_tokens(train, rollout, now, ...): one row a (response token, inner iteration) that counts, has an advantage, and
-- a finite logprob in all three passes; bias = weight f(ratio_used) - f(ratio_true). Where the loss takes one ratio of a whole
-- sequence, its tokens share it.
CREATE OR REPLACE MACRO objective_tokens(
    train, rollout, now, kind := 'ppo_clip', level := 'token', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL,
    denominator := 'train', correction := 'none', correction_low := NULL, correction_high := NULL
) AS TABLE
    SELECT run, step, seq_id, group_id, iteration, position, advantage, d, drift, ratio_true, ratio_used, weight,
           term_true, term_used, term_used - term_true AS bias_uncorrected, weight * term_used - term_true AS bias,
           is_clipped_true, is_clipped_used
    FROM (
        SELECT *,
               loss_term(ratio_true, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard) AS term_true,
               loss_term(ratio_used, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard) AS term_used,
               loss_clips(ratio_true, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard) AS is_clipped_true,
               loss_clips(ratio_used, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard) AS is_clipped_used
        FROM (
            SELECT *, clamped_exp(log_true) AS ratio_true,
                   CASE denominator WHEN 'current' THEN 1.0 WHEN 'rollout' THEN clamped_exp(log_true)
                        WHEN 'train' THEN clamped_exp(log_used)
                        ELSE error('denominator: train, rollout or current') END AS ratio_used,
                   correction_weight(CASE WHEN correction LIKE 'sequence%' THEN sum_d ELSE d END,
                                     correction, correction_low, correction_high) AS weight
            FROM (
                SELECT *,
                       CASE level WHEN 'token' THEN d + drift WHEN 'sequence_mean' THEN mean_d + mean_drift
                            WHEN 'sequence_sum' THEN sum_d + sum_drift
                            ELSE error('level: token, sequence_mean or sequence_sum') END AS log_true,
                       CASE level WHEN 'token' THEN drift WHEN 'sequence_mean' THEN mean_drift ELSE sum_drift END AS log_used
                FROM (
                    SELECT run, step, seq_id, group_id, iteration, position, advantage, d, stale AS drift,
                           sum(d) OVER sequence AS sum_d, avg(d) OVER sequence AS mean_d,
                           sum(stale) OVER sequence AS sum_drift, avg(stale) OVER sequence AS mean_drift
                    FROM pair_now(train, rollout, now)
                    WHERE mask AND isfinite(d) AND isfinite(stale)
                    WINDOW sequence AS (PARTITION BY run, step, seq_id, iteration)
                )
            )
        )
        WHERE isfinite(advantage)
    );

-- objective_steps(train, rollout, now, ...): one row a step and inner iteration, over its tokens, each counting alike.
CREATE OR REPLACE MACRO objective_steps(
    train, rollout, now, kind := 'ppo_clip', level := 'token', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL,
    denominator := 'train', correction := 'none', correction_low := NULL, correction_high := NULL
) AS TABLE
    SELECT run, step, iteration,
           count(*) AS num_tokens,
           avg(bias) AS mean_bias,
           coalesce(sum(bias) FILTER (advantage > 0), 0.0) / count(*) AS mean_bias_positive,
           coalesce(sum(bias) FILTER (advantage < 0), 0.0) / count(*) AS mean_bias_negative,
           avg(abs(bias)) AS mean_abs_bias,
           sum(bias) / nullif(sum(abs(bias)), 0) AS skew,
           sum(bias) / nullif(sum(abs(term_true)), 0) AS relative_bias,
           sum(abs(bias)) / nullif(sum(abs(term_true)), 0) AS relative_abs_bias,
           avg((is_clipped_used AND NOT is_clipped_true)::INTEGER) AS flipped_to_clipped,
           avg((is_clipped_true AND NOT is_clipped_used)::INTEGER) AS flipped_to_free,
           covar_pop(advantage * ratio_true, d) AS cov_weighed_d,
           var_pop(d) AS var_d, var_pop(drift) AS var_drift, covar_pop(d, drift) AS cov_d_drift
    FROM objective_tokens(
        train, rollout, now, kind := kind, level := level, clip_low := clip_low, clip_high := clip_high,
        clip_hard := clip_hard, denominator := denominator, correction := correction, correction_low := correction_low,
        correction_high := correction_high
    )
    GROUP BY run, step, iteration
    ORDER BY run, step, iteration;
