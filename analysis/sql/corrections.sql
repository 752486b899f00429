-- Counterfactual corrections: which recorded tokens a rule would have kept, and with what weight.
--   rho_t = exp(d) of a token, rho_seq = exp(sum of d) and rho_geo = exp(mean of d) of a sequence, d = logprob(a) - logprob(b).
--   Exponents are clamped to +-20 nats, as in verl: exp(20) is 4.9e8.
-- The table correction_rules has one row per rule. Zones are the intervals between the token bounds of all rules. A rule treats
-- all tokens of a zone equally, so tokens are read only once for any number of rules.

-- NULL stays NULL, although greatest and least ignore it.
CREATE OR REPLACE MACRO clamped(x) AS CASE WHEN x IS NOT NULL THEN greatest(least(x, 20.0::DOUBLE), -20.0::DOUBLE) END;

-- Treatment of a ratio: 0 cut, 1 truncated to high, 2 unchanged.
CREATE OR REPLACE MACRO treatment(ratio, low, high, truncates) AS
    CASE WHEN ratio < low THEN 0 WHEN ratio <= high THEN 2 WHEN truncates THEN 1 ELSE 0 END;

-- correction_zones(a, b): one row per (sequence, sign of the advantage, zone of the ratio); the zone is NULL for tokens whose
-- logprob is not finite. `ratio` is any ratio of the zone; max_k2 and min_ratio cover the whole sequence. c is the clamped d.
CREATE OR REPLACE MACRO correction_zones(a, b) AS TABLE
    SELECT run, step, sequence, zone.*
    FROM (
        SELECT run, step, row_number() OVER () AS sequence,
               unnest(correction_zones_of(logprobs_a, logprobs_b, mask, advantage, advantages)) AS zone
        FROM pair_lists(a, b, NULL, NULL, NULL)
    );

-- correction_groups(a, b, by_step, by_length): one row per rule and run, step, or quarter of the run's sequences by length.
--   {sequence_class} numbers the intervals between the rules' bounds on sequences. A rule treats all sequences of a class
--   equally, so sums over classes suffice, and millions of sequences have only a few hundred classes.
CREATE OR REPLACE MACRO correction_groups(a, b, by_step, by_length) AS TABLE
    WITH zones AS MATERIALIZED (
        FROM correction_zones(a, b)
    ),
    pooled AS (
        SELECT sequence, any_value(run) AS run, any_value(step) AS step,
               sum(num_tokens)::BIGINT AS length, sum(num_nan)::BIGINT AS num_nan, sum(num_inf)::BIGINT AS num_inf,
               exp(clamped(sum(sum_d))) AS seq_ratio, sum(sum_c) AS sum_c,
               sum(sum_c) / nullif(sum(num_tokens), 0) AS mean_c,
               sum(sum_k3) / nullif(sum(num_tokens), 0) AS mean_k3, max(max_k2) AS max_k2,
               min(min_ratio) AS min_ratio, coalesce(bit_or(1 << zone), 0) AS zones_there,
               coalesce(bit_or(1 << zone) FILTER (sign > 0), 0) AS zones_positive,
               coalesce(bit_or(1 << zone) FILTER (sign < 0), 0) AS zones_negative
        FROM zones
        GROUP BY sequence
    ),
    cuts AS (
        SELECT run, quantile_disc(length, [0.25, 0.5, 0.75]) FILTER (length > 0) AS edges FROM pooled GROUP BY run
    ),
    whole AS MATERIALIZED (
        SELECT * EXCLUDE (step, edges), CASE WHEN by_step THEN step ELSE 0 END AS step,
               CASE WHEN by_length THEN 1 + coalesce((length > edges[1])::INTEGER + (length > edges[2])::INTEGER
                                                     + (length > edges[3])::INTEGER, 0) ELSE 0 END AS quarter,
               {sequence_class} AS class
        FROM pooled JOIN cuts USING (run)
    ),
    groups AS (
        SELECT run, step, quarter, min(length) FILTER (length > 0) AS shortest, max(length) AS longest,
               count(*) FILTER (length > 0) AS num_sequences, sum(length)::BIGINT AS num_tokens,
               sum(num_nan)::BIGINT AS num_nan, sum(num_inf)::BIGINT AS num_inf
        FROM whole
        GROUP BY run, step, quarter
    ),
    -- A rule gives the same result for any sequence of a class.
    judged AS (
        SELECT class, rules.*,
               sum_c BETWEEN sum_low AND sum_high AND mean_c BETWEEN mean_low AND mean_high
               AND mean_k3 <= k3_high AND max_k2 <= k2_high AND min_ratio >= token_low AS is_kept,
               CASE level WHEN 'sequence' THEN treatment(seq_ratio, low, high, truncates) END AS seq_treatment
        FROM (
            SELECT class, max(sum_c) AS sum_c, max(mean_c) AS mean_c, max(mean_k3) AS mean_k3, max(max_k2) AS max_k2,
                   max(min_ratio) AS min_ratio, max(seq_ratio) AS seq_ratio
            FROM whole
            WHERE length > 0
            GROUP BY class
        ) CROSS JOIN correction_rules AS rules
    ),
    zone_treatments AS (
        SELECT place, zone, CASE WHEN level = 'token' THEN treatment(ratio, low, high, truncates) ELSE 2 END AS token_treatment
        FROM (SELECT zone, max(ratio) AS ratio FROM zones WHERE num_tokens > 0 GROUP BY zone) CROSS JOIN correction_rules
    ),
    cut_zones AS (
        SELECT place, coalesce(bit_or(1 << zone) FILTER (token_treatment = 0), 0) AS cut FROM zone_treatments GROUP BY place
    ),
    sequence_classes AS (
        SELECT run, step, quarter, class, zones_there, zones_positive, zones_negative,
               count(*) AS num, total(seq_ratio) AS sum_ratio, total(seq_ratio * seq_ratio) AS sum_ratio2,
               total(abs(seq_ratio - 1)) AS sum_abs_growth
        FROM whole
        WHERE length > 0
        GROUP BY ALL
    ),
    of_sequences AS (
        SELECT run, step, quarter, place,
               sum(num) FILTER (gone OR (zones_there & ~cut) = 0) AS num_sequences_cut,
               sum(num) FILTER (gone OR (zones_there & cut) <> 0) AS num_sequences_touched,
               sum(num) FILTER (zones_positive <> 0) AS num_sequences_positive,
               sum(num) FILTER (zones_negative <> 0) AS num_sequences_negative,
               sum(num) FILTER (zones_positive <> 0 AND (gone OR (zones_positive & ~cut) = 0)) AS num_sequences_cut_positive,
               sum(num) FILTER (zones_negative <> 0 AND (gone OR (zones_negative & ~cut) = 0)) AS num_sequences_cut_negative,
               total(CASE WHEN level = 'token' THEN NULL WHEN gone THEN 0 WHEN level = 'none' THEN num
                          WHEN seq_treatment = 1 THEN num * high ELSE sum_ratio END) AS sum_seq_weight,
               total(CASE WHEN level = 'token' THEN NULL WHEN gone THEN 0 WHEN level = 'none' THEN num
                          WHEN seq_treatment = 1 THEN num * high * high ELSE sum_ratio2 END) AS sum_seq_weight2,
               total(CASE WHEN level = 'token' THEN NULL WHEN gone THEN sum_ratio WHEN level = 'none' THEN sum_abs_growth
                          WHEN seq_treatment = 1 THEN sum_ratio - num * high ELSE 0 END) AS sum_seq_deviation,
               total(sum_ratio) AS sum_seq_ratio, total(CASE WHEN gone THEN sum_ratio ELSE 0 END) AS sum_seq_ratio_cut
        FROM (
            SELECT *, NOT is_kept OR coalesce(seq_treatment = 0, false) AS gone
            FROM sequence_classes JOIN judged USING (class) JOIN cut_zones USING (place)
        )
        GROUP BY run, step, quarter, place
    ),
    token_classes AS (
        SELECT whole.run, whole.step, whole.quarter, class, sign, zone, sum(num_tokens)::BIGINT AS num,
               total(sum_ratio) AS sum_ratio, total(sum_ratio2) AS sum_ratio2, total(sum_abs_growth) AS sum_abs_growth,
               total(sum_abs_advantage) AS sum_abs_advantage,
               total(num_tokens * seq_ratio) AS sum_seq_ratio, total(num_tokens * seq_ratio * seq_ratio) AS sum_seq_ratio2
        FROM zones JOIN whole USING (sequence)
        WHERE num_tokens > 0
        GROUP BY ALL
    ),
    weighed AS (
        -- treatment: 0 cut, 1 truncated, 2 unchanged; sum_weight includes rejected sequences.
        SELECT *, CASE WHEN is_kept THEN weighing ELSE 0 END AS treatment,
               CASE weighing WHEN 0 THEN 0 WHEN 1 THEN num * high
                    ELSE CASE level WHEN 'none' THEN num WHEN 'token' THEN sum_ratio ELSE sum_seq_ratio END END AS sum_weight,
               CASE weighing WHEN 0 THEN 0 WHEN 1 THEN num * high * high
                    ELSE CASE level WHEN 'none' THEN num WHEN 'token' THEN sum_ratio2 ELSE sum_seq_ratio2 END END
                   AS sum_weight2
        FROM (
            SELECT *, coalesce(seq_treatment, token_treatment) AS weighing
            FROM token_classes JOIN judged USING (class) JOIN zone_treatments USING (place, zone)
        )
    ),
    of_tokens AS (
        SELECT run, step, quarter, place, sum(num) FILTER (treatment = 0) AS num_tokens_cut,
               sum(num) FILTER (treatment = 1) AS num_tokens_truncated,
               sum(num) FILTER (sign > 0) AS num_positive, sum(num) FILTER (sign < 0) AS num_negative,
               sum(num) FILTER (sign > 0 AND treatment = 0) AS num_cut_positive,
               sum(num) FILTER (sign < 0 AND treatment = 0) AS num_cut_negative,
               sum(num) FILTER (sign > 0 AND treatment = 1) AS num_truncated_positive,
               sum(num) FILTER (sign < 0 AND treatment = 1) AS num_truncated_negative,
               total(CASE WHEN sign > 0 THEN sum_abs_advantage END) AS advantage_positive,
               total(CASE WHEN sign > 0 THEN CASE WHEN treatment = 0 THEN sum_abs_advantage ELSE 0 END END)
                   AS advantage_cut_positive,
               total(CASE WHEN sign < 0 THEN sum_abs_advantage END) AS advantage_negative,
               total(CASE WHEN sign < 0 THEN CASE WHEN treatment = 0 THEN sum_abs_advantage ELSE 0 END END)
                   AS advantage_cut_negative,
               total(sum_ratio) AS sum_ratio, total(CASE WHEN treatment = 0 THEN sum_ratio ELSE 0 END) AS sum_ratio_cut,
               total(CASE WHEN is_kept THEN sum_weight ELSE 0 END) AS sum_weight,
               total(CASE WHEN is_kept THEN sum_weight2 ELSE 0 END) AS sum_weight2,
               total(CASE WHEN level <> 'none' THEN sum_weight END) AS sum_importance,
               total(CASE WHEN level <> 'none' THEN sum_weight2 END) AS sum_importance2,
               total(CASE WHEN level = 'sequence' THEN NULL WHEN treatment = 0 THEN sum_ratio
                          WHEN level = 'none' THEN sum_abs_growth WHEN treatment = 1 THEN sum_ratio - num * high ELSE 0 END)
                   AS sum_deviation
        FROM weighed
        GROUP BY run, step, quarter, place
    )
    SELECT run, name AS correction, step, quarter, shortest, longest, rule, bound_on, kept, num_sequences, num_tokens, num_nan, num_inf,
           coalesce(num_tokens_cut, 0) / nullif(num_tokens, 0) AS share_tokens_cut,
           coalesce(num_cut_positive, 0) / nullif(num_positive, 0) AS share_tokens_cut_positive,
           coalesce(num_cut_negative, 0) / nullif(num_negative, 0) AS share_tokens_cut_negative,
           coalesce(num_tokens_truncated, 0) / nullif(num_tokens, 0) AS share_tokens_truncated,
           coalesce(num_truncated_positive, 0) / nullif(num_positive, 0) AS share_tokens_truncated_positive,
           coalesce(num_truncated_negative, 0) / nullif(num_negative, 0) AS share_tokens_truncated_negative,
           coalesce(num_sequences_touched, 0) / nullif(num_sequences, 0) AS share_sequences_touched,
           coalesce(num_sequences_cut, 0) / nullif(num_sequences, 0) AS share_sequences_cut,
           coalesce(num_sequences_cut_positive, 0) / nullif(num_sequences_positive, 0) AS share_sequences_cut_positive,
           coalesce(num_sequences_cut_negative, 0) / nullif(num_sequences_negative, 0) AS share_sequences_cut_negative,
           coalesce(num_tokens_cut, 0)::BIGINT AS num_tokens_cut, coalesce(num_sequences_cut, 0)::BIGINT AS num_sequences_cut,
           advantage_cut_positive, advantage_cut_negative,
           advantage_cut_positive / nullif(advantage_positive, 0) AS share_advantage_cut_positive,
           advantage_cut_negative / nullif(advantage_negative, 0) AS share_advantage_cut_negative,
           sum_weight / num_tokens AS mean_weight,
           sum_weight ** 2 / nullif(num_tokens * sum_weight2, 0) AS ess_token,
           sum_seq_weight ** 2 / nullif(num_sequences * sum_seq_weight2, 0) AS ess_sequence,
           (sum_importance / num_tokens + 1e-8) ** 2 / nullif(sum_importance2 / num_tokens, 0) AS ess_verl,
           sum_ratio_cut / sum_ratio AS mass_cut_token,
           CASE WHEN sum_seq_weight IS NOT NULL THEN sum_seq_ratio_cut / sum_seq_ratio END AS mass_cut_sequence,
           sum_deviation / num_tokens AS bias_token,
           sum_seq_deviation / num_sequences AS bias_sequence,
           CASE WHEN level <> 'sequence' THEN sum_weight2 / num_tokens END AS variance_token,
           sum_seq_weight2 / num_sequences AS variance_sequence
    FROM groups CROSS JOIN correction_rules
    LEFT JOIN of_tokens USING (run, step, quarter, place)
    LEFT JOIN of_sequences USING (run, step, quarter, place)
    ORDER BY run, step, quarter, place;

-- Corrections by run, by step and by length quartile.
CREATE OR REPLACE MACRO correction_runs(a, b) AS TABLE
    SELECT * EXCLUDE (step, quarter, shortest, longest) FROM correction_groups(a, b, false, false);

CREATE OR REPLACE MACRO correction_steps(a, b) AS TABLE
    SELECT * EXCLUDE (quarter, shortest, longest) FROM correction_groups(a, b, true, false);

CREATE OR REPLACE MACRO correction_lengths(a, b) AS TABLE
    SELECT * EXCLUDE (step) FROM correction_groups(a, b, false, true);
