-- Effect of the mismatch on an objective, per token: d = train - rollout, drift = current - train (nats), rho* = exp(d + drift).
-- Options have the names and defaults of schemas.loss.Loss; `now` is the pass inside the loss: 'current', or 'train' if that
-- was not recorded.

-- objective_tokens(train, rollout, now, ...): one row per (response token, inner iteration) that counts and has an advantage and
-- finite logprobs in all three passes. term_applied is weight f(ratio_used), or f(weight ratio_used) for vespo, and bias is
-- term_applied - f(ratio_true). bias_unclipped is the bias of the importance-weighted term without clipping. A
-- sequence-level ratio is the same for all tokens of the sequence. For vespo this is so at every level; its ratio is the product
-- of token ratios, clamped to exp(+-20).
CREATE OR REPLACE MACRO objective_tokens(
    train, rollout, now, kind := 'ppo_clip', level := 'token', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL,
    denominator := 'train', correction := 'none', correction_low := NULL, correction_high := NULL,
    sapo_temperature_pos := 1.0, sapo_temperature_neg := 1.05,
    vespo_k_pos := 2.0, vespo_lambda_pos := 3.0, vespo_k_neg := 3.0, vespo_lambda_neg := 2.0
) AS TABLE
    SELECT run, step, seq_id, group_id, iteration, position, advantage, d, drift, ratio_true, ratio_used, weight,
           term_true, term_used, term_used - term_true AS bias_uncorrected, term_applied - term_true AS bias,
           is_clipped_true, is_clipped_used, term_applied, advantage * (weight * ratio_used - ratio_true) AS bias_unclipped
    FROM (
        SELECT *,
               CASE kind WHEN 'vespo' THEN term_inside ELSE weight * term_used END AS term_applied
        FROM (
            SELECT *,
                   loss_term(
                       ratio_true, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard,
                       sapo_temperature_pos := sapo_temperature_pos, sapo_temperature_neg := sapo_temperature_neg,
                       vespo_k_pos := vespo_k_pos, vespo_lambda_pos := vespo_lambda_pos, vespo_k_neg := vespo_k_neg,
                       vespo_lambda_neg := vespo_lambda_neg
                   ) AS term_true,
                   loss_term(
                       ratio_used, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard,
                       sapo_temperature_pos := sapo_temperature_pos, sapo_temperature_neg := sapo_temperature_neg,
                       vespo_k_pos := vespo_k_pos, vespo_lambda_pos := vespo_lambda_pos, vespo_k_neg := vespo_k_neg,
                       vespo_lambda_neg := vespo_lambda_neg
                   ) AS term_used,
                   CASE kind WHEN 'vespo' THEN loss_term(
                       clamped_exp(log_used + log_weight), advantage, kind := 'vespo', vespo_k_pos := vespo_k_pos,
                       vespo_lambda_pos := vespo_lambda_pos, vespo_k_neg := vespo_k_neg, vespo_lambda_neg := vespo_lambda_neg
                   ) END AS term_inside,
                   loss_clips(ratio_true, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard) AS is_clipped_true,
                   loss_clips(ratio_used, advantage, kind := kind, clip_low := clip_low, clip_high := clip_high, clip_hard := clip_hard) AS is_clipped_used
            FROM (
                SELECT *, clamped_exp(log_true) AS ratio_true, clamped_exp(log_used) AS ratio_used,
                       CASE kind WHEN 'vespo' THEN exp(log_weight)
                            ELSE correction_weight(CASE WHEN correction LIKE 'sequence%' THEN sum_d ELSE d END,
                                                   correction, correction_low, correction_high) END AS weight
                FROM (
                    SELECT *,
                           CASE denominator WHEN 'current' THEN 0.0 WHEN 'rollout' THEN log_true WHEN 'train' THEN log_drift
                                ELSE error('denominator: train, rollout or current') END AS log_used,
                           CASE WHEN kind <> 'vespo' OR correction = 'none' THEN 0.0
                                WHEN correction LIKE 'sequence%'
                                THEN vespo_log(correction_weight(sum_d, correction, correction_low, correction_high))
                                ELSE sum_log_weight END AS log_weight
                    FROM (
                        SELECT *,
                               CASE WHEN kind = 'vespo' THEN product_true WHEN level = 'token' THEN d + drift
                                    WHEN level = 'sequence_mean' THEN mean_d + mean_drift
                                    WHEN level = 'sequence_sum' THEN sum_d + sum_drift
                                    ELSE error('level: token, sequence_mean or sequence_sum') END AS log_true,
                               CASE WHEN kind = 'vespo' THEN product_drift WHEN level = 'token' THEN drift
                                    WHEN level = 'sequence_mean' THEN mean_drift ELSE sum_drift END AS log_drift
                        FROM (
                            SELECT run, step, seq_id, group_id, iteration, position, advantage, d, stale AS drift,
                                   sum(d) OVER sequence AS sum_d, avg(d) OVER sequence AS mean_d,
                                   sum(stale) OVER sequence AS sum_drift, avg(stale) OVER sequence AS mean_drift,
                                   sum(CASE kind WHEN 'vespo' THEN greatest(least(d + stale, 20.0), -20.0) END)
                                       OVER sequence AS product_true,
                                   sum(CASE kind WHEN 'vespo' THEN greatest(least(stale, 20.0), -20.0) END)
                                       OVER sequence AS product_drift,
                                   sum(CASE WHEN kind = 'vespo' AND correction NOT LIKE 'sequence%'
                                            THEN vespo_log(correction_weight(d, correction, correction_low, correction_high))
                                       END) OVER sequence AS sum_log_weight
                            FROM pair_now(train, rollout, now)
                            WHERE mask AND isfinite(d) AND isfinite(stale)
                            WINDOW sequence AS (PARTITION BY run, step, seq_id, iteration)
                        )
                    )
                )
            )
            WHERE isfinite(advantage)
        )
    );

-- loss_shares(now, ...): one row per (sequence, inner iteration) that went through the loss; share is the factor by
-- which the loss multiplies each token's term. num_tokens depends on the mask only, and rows without tokens count in
-- num_rows, so that sum(share * term_applied) of objective_tokens is minus the policy part of the loss, except for
-- cispo and vespo. micro_token_mean treats the update as one batch if forwards were not recorded. `sequence` divides
-- the sequence's single term among its tokens. `constant` is the loss's max_tokens, also a column name here.
CREATE OR REPLACE MACRO loss_shares(now, aggregation := 'token_mean', constant := NULL) AS TABLE
    SELECT run, step, seq_id, iteration, num_tokens, num_rows,
           CASE WHEN aggregation IN ('token_mean', 'batch_token_mean') THEN 1.0 / greatest(num_update_tokens, 1)
                WHEN aggregation = 'micro_token_mean' AND num_placed < num_rows THEN 1.0 / greatest(num_update_tokens, 1)
                WHEN aggregation = 'micro_token_mean' THEN 1.0 / greatest(num_forward_tokens, 1) / num_forwards
                WHEN aggregation IN ('sequence_mean', 'sequence') THEN 1.0 / num_rows / greatest(num_tokens, 1)
                WHEN aggregation = 'sequence_sum' THEN 1.0 / num_rows
                WHEN aggregation = 'constant' THEN 1.0 / num_rows / coalesce(constant, 1)
                ELSE error('aggregation: token_mean, batch_token_mean, micro_token_mean, sequence_mean, sequence_sum, '
                           || 'sequence or constant') END AS share
    FROM (
        SELECT run, step, seq_id, iteration, num_tokens, count(*) OVER updates AS num_rows,
               count(forward_id) OVER updates AS num_placed, sum(num_tokens) OVER updates AS num_update_tokens,
               sum(num_tokens) OVER (PARTITION BY run, step, iteration, writer, forward_id) AS num_forward_tokens,
               count(DISTINCT hash(writer, forward_id)) OVER updates AS num_forwards
        FROM (
            SELECT n.run, n.step, n.seq_id, n.iteration, n.writer, n.forward_id,
                   CASE WHEN s.response_mask IS NULL THEN s.num_response_tokens
                        ELSE coalesce(list_sum(s.response_mask::INTEGER[]), 0) END::BIGINT AS num_tokens
            FROM scores AS n
            JOIN sequences AS s ON s.run = n.run AND s.step = n.step AND s.seq_id = n.seq_id
            WHERE n."pass" = now
        )
        WINDOW updates AS (PARTITION BY run, step, iteration)
    );
