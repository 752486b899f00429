-- Corrections as counterfactuals: what a rule would have kept of the recorded tokens, and with which weights.
--   rho_t = exp(d) of a token, rho_seq = exp(sum of d) and rho_geo = exp(mean of d) of a sequence, d = logprob(a) - logprob(b).
--   Exponents are clamped to 20 nats either way, as verl does: exp(20) is 4.9e8.
-- The table correction_rules has one row a rule; {zone} says in which interval between the rules' token bounds a ratio lies.
-- Every rule treats the tokens of one interval alike, so that tokens are read once, however many rules there are.

-- NULL stays NULL, which greatest and least would pass over.
CREATE OR REPLACE MACRO clamped(x) AS CASE WHEN x IS NOT NULL THEN greatest(least(x, 20.0::DOUBLE), -20.0::DOUBLE) END;

-- The weight that a ratio gets: itself from low to high; above, high where the rule truncates; else 0.
CREATE OR REPLACE MACRO corrected(ratio, low, high, truncates) AS
    CASE WHEN ratio < low THEN 0.0 WHEN ratio <= high THEN ratio WHEN truncates THEN high ELSE 0.0 END;

-- What becomes of a ratio: 0 cut, 1 truncated to high, 2 left as it is.
CREATE OR REPLACE MACRO treatment(ratio, low, high, truncates) AS
    CASE WHEN ratio < low THEN 0 WHEN ratio <= high THEN 2 WHEN truncates THEN 1 ELSE 0 END;

-- correction_tokens(a, b): the tokens that count, with d NULL where it is not finite; sequences are numbered.
CREATE OR REPLACE MACRO correction_tokens(a, b) AS TABLE
    SELECT sequence, run, step, is_nan, d, clamped(d) AS c, exp(clamped(d)) AS ratio,
           CASE WHEN isfinite(advantage) THEN sign(advantage)::INTEGER END AS sign,
           CASE WHEN isfinite(advantage) THEN abs(advantage) END AS abs_advantage
    FROM (
        SELECT sequence, run, step, advantage,
               isnan(logprob_a) OR isnan(logprob_b) AS is_nan,
               CASE WHEN isfinite(logprob_a) AND isfinite(logprob_b) THEN logprob_a - logprob_b END AS d
        FROM (
            SELECT sequence, run, step, unnest(logprobs_a)::DOUBLE AS logprob_a, unnest(logprobs_b)::DOUBLE AS logprob_b,
                   unnest(mask) AS mask, unnest(advantages)::DOUBLE AS advantage
            FROM (
                SELECT row_number() OVER () AS sequence, s.run, s.step,
                       scores_a.logprobs AS logprobs_a, scores_b.logprobs AS logprobs_b,
                       coalesce(s.response_mask, list_resize([]::BOOLEAN[], s.num_response_tokens, true)) AS mask,
                       coalesce(s.advantages, list_resize([]::FLOAT[], s.num_response_tokens, s.advantage)) AS advantages
                FROM sequences AS s
                JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
                JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id
                WHERE scores_a."pass" = a AND scores_b."pass" = b
            )
        )
        WHERE mask AND logprob_a IS NOT NULL AND logprob_b IS NOT NULL
    );

-- correction_zones(a, b): one row a (sequence, sign of the advantage, interval of the ratio).
CREATE OR REPLACE MACRO correction_zones(a, b) AS TABLE
    SELECT sequence, any_value(run) AS run, any_value(step) AS step, sign, {zone} AS zone,
           count(d) AS num_tokens,
           count(*) FILTER (is_nan) AS num_nan,
           count(*) FILTER (d IS NULL AND NOT is_nan) AS num_inf,
           max(ratio) AS ratio,
           sum(ratio) AS sum_ratio,
           sum(ratio * ratio) AS sum_ratio2,
           sum(abs(expm1(c))) AS sum_abs_growth,
           sum(abs_advantage) FILTER (d IS NOT NULL) AS sum_abs_advantage,
           sum(d) AS sum_d,
           sum(c) AS sum_c,
           sum(expm1_minus(c)) AS sum_k3,
           max(c * c / 2) AS max_k2,
           min(ratio) AS min_ratio
    FROM correction_tokens(a, b)
    GROUP BY sequence, sign, zone;

-- correction_sequences(a, b): one row a (sequence, rule) with what the rule does to it. A sequence without a token to compare
-- is there with length 0.
CREATE OR REPLACE MACRO correction_sequences(a, b) AS TABLE
    WITH zones AS MATERIALIZED (
        FROM correction_zones(a, b)
    ),
    whole AS (
        SELECT sequence, sum(num_tokens)::BIGINT AS length,
               exp(clamped(sum(sum_d))) AS seq_ratio,
               sum(sum_c) AS sum_c,
               sum(sum_c) / nullif(sum(num_tokens), 0) AS mean_c,
               sum(sum_k3) / nullif(sum(num_tokens), 0) AS mean_k3,
               max(max_k2) AS max_k2,
               min(min_ratio) AS min_ratio
        FROM zones
        GROUP BY sequence
    ),
    judged AS (
        SELECT sequence, length, seq_ratio, rules.*,
               sum_c BETWEEN sum_low AND sum_high AND mean_c BETWEEN mean_low AND mean_high
               AND mean_k3 <= k3_high AND max_k2 <= k2_high AND min_ratio >= token_low AS is_kept
        FROM whole CROSS JOIN correction_rules AS rules
    ),
    treated AS (
        SELECT zones.*, length, seq_ratio, place, level, high, is_kept, corrected(seq_ratio, low, high, truncates) AS seq_weight,
               CASE level WHEN 'none' THEN 2 ELSE treatment(CASE level WHEN 'token' THEN ratio ELSE seq_ratio END,
                                                            low, high, truncates) END AS weighed
        FROM zones JOIN judged USING (sequence)
    ),
    weighted AS (
        SELECT *, CASE WHEN is_kept THEN weighed ELSE 0 END AS treatment,
               CASE level WHEN 'none' THEN num_tokens WHEN 'sequence' THEN num_tokens * seq_weight
                          ELSE CASE weighed WHEN 0 THEN 0 WHEN 1 THEN num_tokens * high ELSE sum_ratio END END AS sum_weight,
               CASE level WHEN 'none' THEN num_tokens WHEN 'sequence' THEN num_tokens * seq_weight * seq_weight
                          ELSE CASE weighed WHEN 0 THEN 0 WHEN 1 THEN num_tokens * high * high ELSE sum_ratio2 END
               END AS sum_weight2
        FROM treated
    )
    SELECT sequence, place, any_value(run) AS run, any_value(step) AS step, any_value(length) AS length,
           sum(num_nan)::BIGINT AS num_nan, sum(num_inf)::BIGINT AS num_inf,
           any_value(seq_ratio) AS seq_ratio,
           any_value(CASE level WHEN 'none' THEN is_kept::DOUBLE WHEN 'sequence' THEN is_kept::INTEGER * seq_weight END)
               AS seq_weight,
           coalesce(sum(num_tokens) FILTER (treatment = 0), 0)::BIGINT AS num_cut,
           coalesce(sum(num_tokens) FILTER (treatment = 1), 0)::BIGINT AS num_truncated,
           coalesce(sum(num_tokens) FILTER (sign > 0), 0)::BIGINT AS num_positive,
           coalesce(sum(num_tokens) FILTER (sign > 0 AND treatment = 0), 0)::BIGINT AS num_cut_positive,
           coalesce(sum(num_tokens) FILTER (sign > 0 AND treatment = 1), 0)::BIGINT AS num_truncated_positive,
           coalesce(sum(num_tokens) FILTER (sign < 0), 0)::BIGINT AS num_negative,
           coalesce(sum(num_tokens) FILTER (sign < 0 AND treatment = 0), 0)::BIGINT AS num_cut_negative,
           coalesce(sum(num_tokens) FILTER (sign < 0 AND treatment = 1), 0)::BIGINT AS num_truncated_negative,
           sum(sum_abs_advantage) FILTER (sign > 0) AS advantage_positive,
           sum(CASE WHEN treatment = 0 THEN sum_abs_advantage ELSE 0 END) FILTER (sign > 0) AS advantage_cut_positive,
           sum(sum_abs_advantage) FILTER (sign < 0) AS advantage_negative,
           sum(CASE WHEN treatment = 0 THEN sum_abs_advantage ELSE 0 END) FILTER (sign < 0) AS advantage_cut_negative,
           sum(sum_ratio) AS sum_ratio,
           sum(CASE WHEN treatment = 0 THEN sum_ratio ELSE 0 END) AS sum_ratio_cut,
           sum(CASE WHEN is_kept THEN sum_weight ELSE 0 END) AS sum_weight,
           sum(CASE WHEN is_kept THEN sum_weight2 ELSE 0 END) AS sum_weight2,
           sum(CASE WHEN level <> 'none' THEN sum_weight END) AS sum_importance,
           sum(CASE WHEN level <> 'none' THEN sum_weight2 END) AS sum_importance2,
           sum(CASE WHEN level = 'sequence' THEN NULL WHEN treatment = 0 THEN sum_ratio
                    WHEN level = 'none' THEN sum_abs_growth WHEN treatment = 1 THEN sum_ratio - num_tokens * high ELSE 0 END)
               AS sum_deviation
    FROM weighted
    GROUP BY sequence, place;

-- correction_groups(a, b, by_step, by_length): one row a rule, of a run, a step of it, or a quarter of its sequences by length.
CREATE OR REPLACE MACRO correction_groups(a, b, by_step, by_length) AS TABLE
    WITH treated AS MATERIALIZED (
        FROM correction_sequences(a, b)
    ),
    cuts AS (
        SELECT run, quantile_disc(length, [0.25, 0.5, 0.75]) FILTER (length > 0) AS edges
        FROM treated
        WHERE place = 0
        GROUP BY run
    ),
    grouped AS (
        SELECT run, place,
               CASE WHEN by_step THEN step END AS step,
               CASE WHEN by_length THEN 1 + (length > edges[1])::INTEGER + (length > edges[2])::INTEGER
                                          + (length > edges[3])::INTEGER END AS quarter,
               min(length) FILTER (length > 0) AS shortest, max(length) AS longest,
               count(*) FILTER (length > 0) AS num_sequences, sum(length)::BIGINT AS num_tokens,
               sum(num_nan)::BIGINT AS num_nan, sum(num_inf)::BIGINT AS num_inf,
               sum(num_cut)::BIGINT AS num_tokens_cut, sum(num_truncated)::BIGINT AS num_tokens_truncated,
               sum(num_positive)::BIGINT AS num_positive, sum(num_negative)::BIGINT AS num_negative,
               sum(num_cut_positive)::BIGINT AS num_cut_positive, sum(num_cut_negative)::BIGINT AS num_cut_negative,
               sum(num_truncated_positive)::BIGINT AS num_truncated_positive,
               sum(num_truncated_negative)::BIGINT AS num_truncated_negative,
               count(*) FILTER (length > 0 AND num_cut = length) AS num_sequences_cut,
               count(*) FILTER (num_cut > 0) AS num_sequences_touched,
               count(*) FILTER (num_positive > 0) AS num_sequences_positive,
               count(*) FILTER (num_negative > 0) AS num_sequences_negative,
               count(*) FILTER (num_positive > 0 AND num_cut_positive = num_positive) AS num_sequences_cut_positive,
               count(*) FILTER (num_negative > 0 AND num_cut_negative = num_negative) AS num_sequences_cut_negative,
               total(advantage_positive) AS advantage_positive, total(advantage_cut_positive) AS advantage_cut_positive,
               total(advantage_negative) AS advantage_negative, total(advantage_cut_negative) AS advantage_cut_negative,
               total(sum_ratio) AS sum_ratio, total(sum_ratio_cut) AS sum_ratio_cut,
               total(sum_weight) AS sum_weight, total(sum_weight2) AS sum_weight2,
               total(sum_importance) AS sum_importance, total(sum_importance2) AS sum_importance2,
               total(sum_deviation) AS sum_deviation,
               total(seq_weight) AS sum_seq_weight, total(seq_weight * seq_weight) AS sum_seq_weight2,
               total(abs(seq_ratio - seq_weight)) AS sum_seq_deviation,
               total(seq_ratio) AS sum_seq_ratio, total(CASE WHEN num_cut = length THEN seq_ratio END) AS sum_seq_ratio_cut,
               total(seq_ratio * seq_ratio) AS sum_seq_ratio2
        FROM treated JOIN cuts USING (run)
        GROUP BY ALL
    )
    SELECT run, name AS correction, step, quarter, shortest, longest, rule, bound_on, kept, num_sequences, num_tokens, num_nan, num_inf,
           num_tokens_cut / nullif(num_tokens, 0) AS share_tokens_cut,
           num_cut_positive / nullif(num_positive, 0) AS share_tokens_cut_positive,
           num_cut_negative / nullif(num_negative, 0) AS share_tokens_cut_negative,
           num_tokens_truncated / nullif(num_tokens, 0) AS share_tokens_truncated,
           num_truncated_positive / nullif(num_positive, 0) AS share_tokens_truncated_positive,
           num_truncated_negative / nullif(num_negative, 0) AS share_tokens_truncated_negative,
           num_sequences_touched / nullif(num_sequences, 0) AS share_sequences_touched,
           num_sequences_cut / nullif(num_sequences, 0) AS share_sequences_cut,
           num_sequences_cut_positive / nullif(num_sequences_positive, 0) AS share_sequences_cut_positive,
           num_sequences_cut_negative / nullif(num_sequences_negative, 0) AS share_sequences_cut_negative,
           num_tokens_cut, num_sequences_cut,
           advantage_cut_positive, advantage_cut_negative,
           advantage_cut_positive / nullif(advantage_positive, 0) AS share_advantage_cut_positive,
           advantage_cut_negative / nullif(advantage_negative, 0) AS share_advantage_cut_negative,
           sum_weight / num_tokens AS mean_weight,
           sum_weight ** 2 / nullif(num_tokens * sum_weight2, 0) AS ess_token,
           sum_seq_weight ** 2 / nullif(num_sequences * sum_seq_weight2, 0) AS ess_sequence,
           (sum_importance / num_tokens + 1e-8) ** 2 / nullif(sum_importance2 / num_tokens, 0) AS ess_verl,
           sum_ratio_cut / sum_ratio AS mass_cut_token,
           CASE WHEN sum_seq_weight IS NOT NULL THEN coalesce(sum_seq_ratio_cut, 0) / sum_seq_ratio END AS mass_cut_sequence,
           sum_deviation / num_tokens AS bias_token,
           sum_seq_deviation / num_sequences AS bias_sequence,
           CASE WHEN level <> 'sequence' THEN sum_weight2 / num_tokens END AS variance_token,
           sum_seq_weight2 / num_sequences AS variance_sequence,
           CASE WHEN has_bounds THEN 2 * sum_seq_ratio2 / num_sequences / high END AS bias_bound,
           CASE WHEN has_bounds THEN high * high END AS variance_bound
    FROM grouped JOIN correction_rules USING (place)
    ORDER BY run, step, quarter, place;

-- By run, by step, and by quarter of the lengths.
CREATE OR REPLACE MACRO correction_runs(a, b) AS TABLE
    SELECT * EXCLUDE (step, quarter, shortest, longest) FROM correction_groups(a, b, false, false);

CREATE OR REPLACE MACRO correction_steps(a, b) AS TABLE
    SELECT * EXCLUDE (quarter, shortest, longest) FROM correction_groups(a, b, true, false);

CREATE OR REPLACE MACRO correction_lengths(a, b) AS TABLE
    SELECT * EXCLUDE (step) FROM correction_groups(a, b, false, true);
