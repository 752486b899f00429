-- Scalar macros for a ratio's term in a loss. Options have the names and defaults of schemas.loss.Loss, and the rules are those
-- of analysis.statistics.loss. The clip metrics that frameworks log are defined in the frameworks' own files.

-- clamped_exp(x): exp of a log-ratio clamped to +-20 nats.
CREATE OR REPLACE MACRO clamped_exp(x) AS exp(greatest(least(x, 20.0), -20.0));

-- vespo_log(ratio): ln of a ratio clamped to vespo's bounds, 1e-8 to exp(20).
CREATE OR REPLACE MACRO vespo_log(ratio) AS CASE WHEN ratio > 1e-8 THEN least(ln(ratio), 20.0) ELSE ln(1e-8) END;

-- vespo_log_weight(log_ratio, k, decay): ln of vespo's phi for a log-ratio within these bounds; decay is its lambda.
CREATE OR REPLACE MACRO vespo_log_weight(log_ratio, k, decay) AS
    greatest(decay, 1e-4)::DOUBLE + k::DOUBLE * log_ratio - greatest(decay, 1e-4)::DOUBLE * exp(log_ratio);

-- sapo_gate(ratio, temperature): 4 / tau sigmoid(tau (ratio - 1)).
CREATE OR REPLACE MACRO sapo_gate(ratio, temperature) AS
    4.0::DOUBLE / temperature / (1 + exp(-temperature::DOUBLE * (ratio - 1)));

-- clip_top(...), clip_bottom(...): the range of ratios in which a loss does not clip, by the sign of the advantage.
CREATE OR REPLACE MACRO clip_top(advantage, kind, clip_high, clip_hard) AS CASE kind
    WHEN 'ppo_clip' THEN CASE WHEN advantage > 0 THEN least(1 + clip_high, coalesce(clip_hard, 'inf'::DOUBLE))
                              ELSE greatest(1 + clip_high, coalesce(clip_hard, 'inf'::DOUBLE)) END
    WHEN 'cispo' THEN clip_high
    ELSE 'inf'::DOUBLE END;
CREATE OR REPLACE MACRO clip_bottom(advantage, kind, clip_low) AS
    CASE WHEN kind = 'ppo_clip' AND NOT advantage > 0 THEN 1 - clip_low ELSE '-inf'::DOUBLE END;

-- loss_term(...): f_A(ratio), a token's contribution to the objective; for cispo and vespo the weight on grad log p.
CREATE OR REPLACE MACRO loss_term(
    ratio, advantage, kind := 'ppo_clip', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL,
    sapo_temperature_pos := 1.0, sapo_temperature_neg := 1.05,
    vespo_k_pos := 2.0, vespo_lambda_pos := 3.0, vespo_k_neg := 3.0, vespo_lambda_neg := 2.0
) AS CASE
    WHEN kind IN ('ppo_clip', 'cispo', 'reinforce')
    THEN greatest(least(ratio, clip_top(advantage, kind, clip_high, clip_hard)), clip_bottom(advantage, kind, clip_low)) * advantage
    WHEN kind = 'sapo' THEN CASE WHEN advantage > 0 THEN sapo_gate(ratio, sapo_temperature_pos)
                                 ELSE sapo_gate(ratio, sapo_temperature_neg) END * advantage
    WHEN kind = 'vespo'
    THEN exp(CASE WHEN advantage >= 0 THEN vespo_log_weight(vespo_log(ratio), vespo_k_pos, vespo_lambda_pos)
                  ELSE vespo_log_weight(vespo_log(ratio), vespo_k_neg, vespo_lambda_neg) END) * advantage
    ELSE error('kind: ppo_clip, reinforce, cispo, sapo or vespo') END;

-- loss_clips(...): true if the ratio is beyond the bound for the sign of the advantage; reinforce, sapo and vespo have none.
CREATE OR REPLACE MACRO loss_clips(
    ratio, advantage, kind := 'ppo_clip', clip_low := 0.2, clip_high := 0.2, clip_hard := NULL
) AS advantage <> 0 AND (ratio > clip_top(advantage, kind, clip_high, clip_hard) OR ratio < clip_bottom(advantage, kind, clip_low));
