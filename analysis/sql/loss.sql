-- What a ratio adds to a loss, a row at a time. The options are those of schemas.loss.Loss, with the same names and defaults.

-- vespo_log(ratio): ln of a ratio within the bounds of vespo, 1e-8 to exp(20).
CREATE OR REPLACE MACRO vespo_log(ratio) AS CASE WHEN ratio > 1e-8 THEN least(ln(ratio), 20.0) ELSE ln(1e-8) END;

-- loss_term(...): f_A(ratio), what a token adds to the objective; of cispo and vespo the weight on grad log p.
CREATE OR REPLACE MACRO loss_term(
    ratio, advantage, kind := 'ppo_clip', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL,
    sapo_temperature_pos := 1.0, sapo_temperature_neg := 1.05,
    vespo_k_pos := 2.0, vespo_lambda_pos := 3.0, vespo_k_neg := 3.0, vespo_lambda_neg := 2.0
) AS CASE kind
    WHEN 'ppo_clip' THEN least(least(ratio, coalesce(clip_hard, 'inf'::DOUBLE)) * advantage,
                               greatest(least(ratio, 1 + clip_high), 1 - clip_low) * advantage)
    WHEN 'reinforce' THEN ratio * advantage
    WHEN 'cispo' THEN least(ratio, clip_high) * advantage
    WHEN 'sapo' THEN CASE WHEN advantage > 0
                          THEN 4.0::DOUBLE / sapo_temperature_pos / (1 + exp(-sapo_temperature_pos::DOUBLE * (ratio - 1)))
                          ELSE 4.0::DOUBLE / sapo_temperature_neg / (1 + exp(-sapo_temperature_neg::DOUBLE * (ratio - 1)))
                     END * advantage
    WHEN 'vespo' THEN CASE WHEN advantage >= 0
                           THEN exp(greatest(vespo_lambda_pos, 1e-4)::DOUBLE * (1 - exp(vespo_log(ratio)))
                                    + vespo_k_pos::DOUBLE * vespo_log(ratio))
                           ELSE exp(greatest(vespo_lambda_neg, 1e-4)::DOUBLE * (1 - exp(vespo_log(ratio)))
                                    + vespo_k_neg::DOUBLE * vespo_log(ratio))
                      END * advantage
    ELSE error('kind: ppo_clip, reinforce, cispo, sapo or vespo') END;

-- loss_clips(...): whether the ratio is beyond the bound that holds for the sign of the advantage. Under ppo_clip such a token
-- gives no gradient, under cispo one whose weight is the bound; the others have no bound.
CREATE OR REPLACE MACRO loss_clips(
    ratio, advantage, kind := 'ppo_clip', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL
) AS CASE kind
    WHEN 'ppo_clip' THEN (advantage > 0 AND ratio > least(1 + clip_high, coalesce(clip_hard, 'inf'::DOUBLE)))
                         OR (advantage < 0 AND (ratio < 1 - clip_low
                                                OR ratio > greatest(1 + clip_high, coalesce(clip_hard, 'inf'::DOUBLE))))
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
