-- verl 0.9.0's off-policy numbers under its own names: compute_offpolicy_metrics of
-- verl/trainer/ppo/rollout_corr_helper.py and calculate_debug_metrics of verl/utils/debug/metrics.py. Pass a is the
-- trainer (old_log_probs), b the rollout.
--   Token means are over unmasked tokens. Sequence means are over the whole batch, in which a fully masked sequence has a mean
--   logprob of 0. NaN and infinities of unmasked tokens propagate.
--   kl = mean(-d); k3_kl = mean(exp(d) - 1 - d), not clamped; chi2_token clamps d, chi2_seq the sum of d, to 20 nats;
--   log_ppl_diff = a sequence's mean rollout logprob minus its mean trainer logprob: above 0, the trainer is less confident.

-- verl_rows(a, b): sequences that both passes scored, with logprobs and mask; an empty mask masks no token.
CREATE OR REPLACE MACRO verl_rows(a, b) AS TABLE
    SELECT s.run, s.step, s.seq_id, scores_a.iteration AS iteration_a, scores_b.iteration AS iteration_b,
           scores_a.logprobs AS old, scores_b.logprobs AS rollout, coalesce(s.response_mask, []::BOOLEAN[]) AS mask
    FROM sequences AS s
    JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
    JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id
    WHERE scores_a."pass" = a AND scores_b."pass" = b
      AND scores_a.logprobs IS NOT NULL AND scores_b.logprobs IS NOT NULL;

-- verl_summed(a, b): sums of each sequence.
CREATE OR REPLACE MACRO verl_summed(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, sums.*
    FROM (SELECT * EXCLUDE (old, rollout, mask), verl_sums(old, rollout, mask) AS sums FROM verl_rows(a, b));

CREATE OR REPLACE MACRO verl_clamped(x) AS torch_clamp(x, -20.0, 20.0);

-- verl_sequences(a, b): verl_summed with mean logprobs added; 0 for a sequence without tokens.
CREATE OR REPLACE MACRO verl_sequences(a, b) AS TABLE
    SELECT *, sum_old / greatest(num_tokens, 1) AS mean_old, sum_rollout / greatest(num_tokens, 1) AS mean_rollout
    FROM verl_summed(a, b);

-- verl_groups(a, b, by_step): one row per step, or per run with step NULL.
CREATE OR REPLACE MACRO verl_groups(a, b, by_step) AS TABLE
    SELECT run, step,
           training_ppl AS "rollout_corr/training_ppl", training_log_ppl AS "rollout_corr/training_log_ppl",
           kl AS "rollout_corr/kl", k3_kl AS "rollout_corr/k3_kl",
           rollout_ppl AS "rollout_corr/rollout_ppl", rollout_log_ppl AS "rollout_corr/rollout_log_ppl",
           log_ppl_diff AS "rollout_corr/log_ppl_diff", log_ppl_abs_diff AS "rollout_corr/log_ppl_abs_diff",
           log_ppl_diff_max AS "rollout_corr/log_ppl_diff_max", log_ppl_diff_min AS "rollout_corr/log_ppl_diff_min",
           ppl_ratio AS "rollout_corr/ppl_ratio",
           chi2_token AS "rollout_corr/chi2_token", chi2_seq AS "rollout_corr/chi2_seq",
           (num_tokens > 0)::INTEGER AS "training/rollout_probs_diff_valid",
           diff_max AS "training/rollout_probs_diff_max", total_diff / num_tokens AS "training/rollout_probs_diff_mean",
           CASE WHEN num_tokens > 1 THEN sqrt(floored((total_spread - total_off * total_off / num_tokens)
                                                           / (num_tokens - 1)))
                ELSE 'NaN'::DOUBLE END AS "training/rollout_probs_diff_std",
           coalesce(correlation(num_tokens, total_off_old, total_off_rollout, total_old, total_rollout, total_product),
                    'NaN'::DOUBLE) AS "training/rollout_actor_probs_pearson_corr"
    FROM (
        SELECT run, grouped_step AS step, sum(num_tokens) AS num_tokens,
               mean_in_order(exp(-mean_old), place) AS training_ppl,
               mean_in_order(-mean_old, place) AS training_log_ppl,
               -sum_in_order(sum_d, place) / sum(num_tokens) AS kl,
               sum_in_order(sum_k3, place) / sum(num_tokens) AS k3_kl,
               mean_in_order(exp(-mean_rollout), place) AS rollout_ppl,
               mean_in_order(-mean_rollout, place) AS rollout_log_ppl,
               mean_in_order(mean_rollout - mean_old, place) AS log_ppl_diff,
               mean_in_order(abs(mean_rollout - mean_old), place) AS log_ppl_abs_diff,
               torch_max(mean_rollout - mean_old) AS log_ppl_diff_max,
               torch_min(mean_rollout - mean_old) AS log_ppl_diff_min,
               mean_in_order(exp(mean_rollout - mean_old), place) AS ppl_ratio,
               sum_in_order(sum_expm1_2d, place) / sum(num_tokens) AS chi2_token,
               mean_in_order(expm1(2 * verl_clamped(sum_d)), place) AS chi2_seq,
               torch_max(max_prob_diff) AS diff_max, sum_in_order(sum_prob_diff, place) AS total_diff,
               -- Squares and products of probabilities, centred near their means.
               sum_in_order(num_tokens * off_diff, place) AS total_off,
               sum_in_order(spread_prob_diff + num_tokens * off_diff * off_diff, place) AS total_spread,
               sum_in_order(num_tokens * off_a, place) AS total_off_old,
               sum_in_order(num_tokens * off_b, place) AS total_off_rollout,
               sum_in_order(spread_prob_a + num_tokens * off_a * off_a, place) AS total_old,
               sum_in_order(spread_prob_b + num_tokens * off_b * off_b, place) AS total_rollout,
               sum_in_order(spread_prob_ab + num_tokens * off_a * off_b, place) AS total_product
        FROM (
            SELECT *, mean_prob_diff - median(mean_prob_diff) OVER grouped AS off_diff,
                   exp(top_a) * (fall_a - median(fall_a) OVER grouped) AS off_a,
                   exp(top_b) * (fall_b - median(fall_b) OVER grouped) AS off_b
            FROM (
                -- NULL for a sequence without tokens, which the aggregates below ignore.
                SELECT *, CASE WHEN num_tokens > 0 THEN fall_from(top_a, peak_a, mean_fall_a) END AS fall_a,
                       CASE WHEN num_tokens > 0 THEN fall_from(top_b, peak_b, mean_fall_b) END AS fall_b
                FROM (
                    SELECT *, max(CASE WHEN num_tokens > 0 THEN peak_a END) OVER grouped AS top_a,
                           max(CASE WHEN num_tokens > 0 THEN peak_b END) OVER grouped AS top_b
                    FROM (
                        SELECT *, CASE WHEN by_step THEN step END AS grouped_step,
                               row_number() OVER (ORDER BY run, step, seq_id, iteration_a, iteration_b) AS place
                        FROM verl_sequences(a, b)
                    )
                    WINDOW grouped AS (PARTITION BY run, grouped_step)
                )
            )
            WINDOW grouped AS (PARTITION BY run, grouped_step)
        )
        GROUP BY run, grouped_step
    )
    WHERE num_tokens > 0
    ORDER BY run, step;

CREATE OR REPLACE MACRO verl_steps(a, b) AS TABLE
    SELECT * FROM verl_groups(a, b, true);

CREATE OR REPLACE MACRO verl_runs(a, b) AS TABLE
    SELECT * EXCLUDE (step) FROM verl_groups(a, b, false);

-- verl 0.9.0's rollout correction: importance-sampling weights and rejections, after compute_rollout_correction_weights
-- and compute_rollout_rejection_mask of verl/trainer/ppo/rollout_corr_helper.py. Pass a is the trainer, b the rollout;
-- rho = exp(d). Log-ratios are clamped to 20 nats before exp. Options have verl's names and syntax.

CREATE OR REPLACE MACRO verl_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, position, verl_clamped(d) AS d
    FROM pair(a, b)
    WHERE mask AND logprob_a IS NOT NULL AND logprob_b IS NOT NULL;

-- 'upper' or 'lower_upper'
CREATE OR REPLACE MACRO verl_upper(bounds) AS split_part(bounds::VARCHAR, '_', -1)::DOUBLE;
CREATE OR REPLACE MACRO verl_lower(bounds) AS
    CASE WHEN contains(bounds::VARCHAR, '_') THEN split_part(bounds::VARCHAR, '_', 1)::DOUBLE END;

-- verl_is_tokens(a, b, rollout_is, rollout_is_threshold): rho of each token or of its sequence, and its weight: capped at the
-- upper bound (TIS), or 0 outside lower_upper (IcePop).
CREATE OR REPLACE MACRO verl_is_tokens(a, b, rollout_is, rollout_is_threshold) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, position, ratio,
           CASE WHEN verl_lower(rollout_is_threshold) IS NULL
                THEN torch_clamp(ratio, 0.0, verl_upper(rollout_is_threshold))
                WHEN ratio >= verl_lower(rollout_is_threshold) AND ratio <= verl_upper(rollout_is_threshold) THEN ratio
                ELSE 0.0 END AS weight
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, position,
               exp(CASE rollout_is WHEN 'token' THEN d WHEN 'sequence' THEN verl_clamped(sum_d)
                                   ELSE error('rollout_is: token or sequence') END) AS ratio
        FROM verl_tokens(a, b)
        JOIN verl_sequences(a, b) USING (run, step, seq_id, iteration_a, iteration_b)
    );

-- verl_is_rows(...): weights and ratios per sequence; a sequence without tokens has mean weight and ratio 0.
CREATE OR REPLACE MACRO verl_is_rows(a, b, rollout_is, rollout_is_threshold) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, sum_d, coalesce(means.num_tokens, 0) AS num_tokens,
           coalesce(mean_weight, 0.0) AS mean_weight, coalesce(mean_ratio, 0.0) AS mean_ratio,
           sum_weight, sum_weight2, spread_weight, max_weight, min_weight, num_high, num_low
    FROM verl_sequences(a, b)
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens,
               avg(weight) AS mean_weight, avg(ratio) AS mean_ratio,
               sum(weight) AS sum_weight, sum(weight * weight) AS sum_weight2, torch_squares(weight) AS spread_weight,
               torch_max(weight) AS max_weight, torch_min(weight) AS min_weight,
               count(*) FILTER (above(ratio, verl_upper(rollout_is_threshold))) AS num_high,
               count(*) FILTER (below(ratio, coalesce(verl_lower(rollout_is_threshold),
                                                      1 / verl_upper(rollout_is_threshold)))) AS num_low
        FROM verl_is_tokens(a, b, rollout_is, rollout_is_threshold)
        GROUP BY ALL
    ) AS means USING (run, step, seq_id, iteration_a, iteration_b);

-- verl_is_groups(...): one row per step, or per run with step NULL. Statistics of the weights are before normalisation.
-- A sequence's sum of d is compared with the bounds' float32 logarithm, as in verl.
CREATE OR REPLACE MACRO verl_is_groups(a, b, by_step, rollout_is, rollout_is_threshold) AS TABLE
    SELECT run, step,
           sum_weight / num_tokens AS "rollout_corr/rollout_is_mean",
           CASE rollout_is WHEN 'token' THEN max_weight ELSE exp(torch_clamp(max_sum, '-inf'::DOUBLE, 20.0)) END
               AS "rollout_corr/rollout_is_max",
           CASE rollout_is WHEN 'token' THEN min_weight ELSE exp(min_sum) END AS "rollout_corr/rollout_is_min",
           CASE rollout_is WHEN 'token' THEN num_high / num_tokens ELSE share_sum_high END
               AS "rollout_corr/rollout_is_ratio_fraction_high",
           CASE rollout_is WHEN 'token' THEN num_low / num_tokens ELSE share_sum_low END
               AS "rollout_corr/rollout_is_ratio_fraction_low",
           CASE WHEN num_tokens > 1 THEN sqrt(floored(total_spread / num_tokens - (total_off / num_tokens) ** 2))
                ELSE 0.0 END AS "rollout_corr/rollout_is_std",
           (sum_weight / num_tokens + 1e-8) ** 2 / nullif(sum_weight2 / num_tokens, 0)
               AS "rollout_corr/rollout_is_eff_sample_size",
           seq_mean AS "rollout_corr/rollout_is_seq_mean",
           CASE WHEN num_sequences > 1 THEN seq_std ELSE 0.0 END AS "rollout_corr/rollout_is_seq_std",
           seq_max AS "rollout_corr/rollout_is_seq_max", seq_min AS "rollout_corr/rollout_is_seq_min",
           seq_max_deviation AS "rollout_corr/rollout_is_seq_max_deviation",
           seq_high AS "rollout_corr/rollout_is_seq_fraction_high",
           seq_low AS "rollout_corr/rollout_is_seq_fraction_low",
           (num_high + num_low) / num_tokens AS "rollout_corr/rollout_is_oob_ratio",
           CASE WHEN above(CASE rollout_is WHEN 'token' THEN sum_weight / num_tokens ELSE full_mean END, 1e-8)
                THEN CASE rollout_is WHEN 'token' THEN sum_weight / num_tokens ELSE full_mean END
                ELSE 1.0 END AS "rollout_corr/rollout_is_batch_norm_factor"
    FROM (
        SELECT run, grouped_step AS step, count(*) AS num_sequences, sum(num_tokens) AS num_tokens,
               sum(sum_weight) AS sum_weight, sum(sum_weight2) AS sum_weight2,
               sum(num_tokens * off_weight) AS total_off,
               sum(spread_weight + num_tokens * off_weight * off_weight) AS total_spread,
               torch_max(max_weight) AS max_weight, torch_min(min_weight) AS min_weight,
               sum(num_high) AS num_high, sum(num_low) AS num_low,
               torch_max(sum_d) AS max_sum, torch_min(sum_d) AS min_sum,
               avg(above(sum_d, ln(upper::FLOAT)::FLOAT::DOUBLE)::INTEGER) AS share_sum_high,
               avg(below(sum_d, ln(lower::FLOAT)::FLOAT::DOUBLE)::INTEGER) AS share_sum_low,
               avg(mean_weight) AS seq_mean, torch_std(mean_weight) AS seq_std,
               torch_max(mean_weight) AS seq_max, torch_min(mean_weight) AS seq_min,
               torch_max(abs(mean_weight - 1)) AS seq_max_deviation,
               avg(above(mean_ratio, upper)::INTEGER) AS seq_high, avg(below(mean_ratio, lower)::INTEGER) AS seq_low,
               avg(mean_weight) FILTER (num_tokens > 0) AS full_mean
        FROM (
            SELECT *, mean_weight - median(mean_weight) OVER (PARTITION BY run, grouped_step) AS off_weight
            FROM (
                SELECT *, CASE WHEN by_step THEN step END AS grouped_step,
                       verl_upper(rollout_is_threshold) AS upper,
                       coalesce(verl_lower(rollout_is_threshold), 1 / verl_upper(rollout_is_threshold)) AS lower
                FROM verl_is_rows(a, b, rollout_is, rollout_is_threshold)
            )
        )
        GROUP BY run, grouped_step
    )
    WHERE num_tokens > 0
    ORDER BY run, step;

CREATE OR REPLACE MACRO verl_is_steps(a, b, rollout_is := 'token', rollout_is_threshold := '2.0') AS TABLE
    SELECT * FROM verl_is_groups(a, b, true, rollout_is, rollout_is_threshold);

CREATE OR REPLACE MACRO verl_is_runs(a, b, rollout_is := 'token', rollout_is_threshold := '2.0') AS TABLE
    SELECT * EXCLUDE (step) FROM verl_is_groups(a, b, false, rollout_is, rollout_is_threshold);

-- verl_is_weights(a, b): one row per unmasked token, with its weight in the loss, normalised per step.
CREATE OR REPLACE MACRO verl_is_weights(
    a, b, rollout_is := 'token', rollout_is_threshold := '2.0', rollout_is_batch_normalize := false
) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, position, ratio,
           CASE WHEN rollout_is_batch_normalize THEN weight / "rollout_corr/rollout_is_batch_norm_factor"
                ELSE weight END AS weight
    FROM verl_is_tokens(a, b, rollout_is, rollout_is_threshold)
    JOIN verl_is_groups(a, b, true, rollout_is, rollout_is_threshold) USING (run, step);

-- verl_rs_options(rollout_rs, rollout_rs_threshold): one row per option, with the bounds of its statistic.
-- The statistic of k1 is -d, so its bounds are on 1 / rho: 'lower_upper' keeps 1 / upper <= rho <= 1 / lower.
CREATE OR REPLACE MACRO verl_rs_options(rollout_rs, rollout_rs_threshold) AS TABLE
    SELECT place, option, taken_over, kind,
           CASE WHEN kind = 'k1' THEN ln(coalesce(verl_lower(bounds), 1 / verl_upper(bounds))) END AS lower,
           CASE WHEN kind = 'k1' THEN ln(verl_upper(bounds)) ELSE verl_upper(bounds) END AS upper
    FROM (
        SELECT *, regexp_replace(option, '_k[123]$', '') AS taken_over, right(option, 2) AS kind,
               CASE WHEN len(all_bounds) = 1 THEN all_bounds[1] ELSE all_bounds[place] END AS bounds
        FROM (
            SELECT option, row_number() OVER (ORDER BY min(written)) AS place
            FROM (
                SELECT unnest(options) AS option, unnest(range(len(options))) AS written
                FROM (SELECT string_split(replace(rollout_rs, ' ', ''), ',') AS options)
            )
            GROUP BY option
        )
        CROSS JOIN (SELECT string_split(replace(rollout_rs_threshold::VARCHAR, ' ', ''), ',') AS all_bounds)
    );

CREATE OR REPLACE MACRO verl_kept(x, lower, upper) AS
    (upper IS NULL OR (x <= upper AND NOT isnan(x) AND (lower IS NULL OR x >= lower)));

-- verl_rs_rows(...): one row per (sequence, option) for sequences with tokens. `value` is the statistic of the
-- sequence; for token options, the mean over its tokens. Sums are over tokens, which share a sequence-level statistic.
CREATE OR REPLACE MACRO verl_rs_rows(a, b, rollout_rs, rollout_rs_threshold) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, place, option, taken_over, kind, lower, upper, num_tokens, value,
           CASE taken_over WHEN 'token' THEN sum_k ELSE num_tokens * value END AS sum_statistic,
           CASE taken_over WHEN 'token' THEN max_k ELSE value END AS max_statistic,
           CASE taken_over WHEN 'token' THEN min_k ELSE value END AS min_statistic,
           CASE taken_over WHEN 'token' THEN mean_inside ELSE inside END AS mean_inside,
           CASE taken_over WHEN 'token' THEN spread_inside ELSE 0.0 END AS spread_inside,
           CASE WHEN taken_over = 'token' THEN num_high WHEN above(value, upper) THEN num_tokens ELSE 0 END AS num_high,
           CASE WHEN taken_over = 'token' THEN num_low WHEN below(value, lower) THEN num_tokens ELSE 0 END AS num_low,
           CASE WHEN taken_over = 'token' THEN num_rejected WHEN verl_kept(value, lower, upper) THEN 0
                ELSE num_tokens END AS num_rejected
    FROM (
        SELECT *, torch_clamp(value, coalesce(lower, 0.0), upper) AS inside
        FROM (
            SELECT *, CASE taken_over WHEN 'seq_sum' THEN sum_k WHEN 'seq_max' THEN max_k ELSE sum_k / num_tokens END
                      AS value
            FROM (
                SELECT run, step, seq_id, iteration_a, iteration_b, place, option, taken_over, kind, lower, upper,
                       count(*) AS num_tokens, sum(k) AS sum_k, torch_max(k) AS max_k, torch_min(k) AS min_k,
                       avg(torch_clamp(k, coalesce(lower, 0.0), upper)) AS mean_inside,
                       torch_squares(torch_clamp(k, coalesce(lower, 0.0), upper)) AS spread_inside,
                       count(*) FILTER (above(k, upper)) AS num_high,
                       count(*) FILTER (below(k, lower)) AS num_low,
                       count(*) FILTER (NOT verl_kept(k, lower, upper)) AS num_rejected
                FROM (
                    SELECT *, CASE kind WHEN 'k1' THEN -d WHEN 'k2' THEN 0.5 * d * d ELSE expm1_minus(d) END AS k
                    FROM verl_tokens(a, b), verl_rs_options(rollout_rs, rollout_rs_threshold)
                )
                GROUP BY ALL
            )
        )
    );

-- verl_rs_groups(...): one row per (step, option), or per (run, option) with step NULL, over sequences with tokens.
CREATE OR REPLACE MACRO verl_rs_groups(a, b, by_step, rollout_rs, rollout_rs_threshold) AS TABLE
    SELECT run, grouped_step AS step, option,
           sum(sum_statistic) / sum(num_tokens) AS mean, torch_max(max_statistic) AS max, torch_min(min_statistic) AS min,
           CASE any_value(taken_over) WHEN 'token' THEN sum(num_high) / sum(num_tokens)
                ELSE avg(above(value, upper)::INTEGER) END AS fraction_high,
           CASE WHEN any_value(kind) <> 'k1' THEN 0.0
                WHEN any_value(taken_over) = 'token' THEN sum(num_low) / sum(num_tokens)
                ELSE avg(below(value, lower)::INTEGER) END AS fraction_low,
           CASE WHEN sum(num_tokens) > 1
                THEN sqrt(floored(sum(spread_inside + num_tokens * off_inside * off_inside) / sum(num_tokens)
                                  - (sum(num_tokens * off_inside) / sum(num_tokens)) ** 2))
                ELSE 0.0 END AS std,
           avg(value) AS seq_mean, CASE WHEN count(*) > 1 THEN torch_std(value) ELSE 0.0 END AS seq_std,
           torch_max(value) AS seq_max, torch_min(value) AS seq_min, torch_max(abs(value)) AS seq_max_deviation,
           avg(above(value, upper)::INTEGER) AS seq_fraction_high,
           CASE any_value(kind) WHEN 'k1' THEN avg(below(value, lower)::INTEGER) END AS seq_fraction_low,
           sum(num_rejected) / sum(num_tokens) AS masked_fraction,
           avg((num_rejected > 0)::INTEGER) AS seq_masked_fraction
    FROM (
        SELECT *, mean_inside - median(mean_inside) OVER (PARTITION BY run, grouped_step, place, option) AS off_inside
        FROM (
            SELECT *, CASE WHEN by_step THEN step END AS grouped_step
            FROM verl_rs_rows(a, b, rollout_rs, rollout_rs_threshold)
        )
    )
    GROUP BY run, grouped_step, place, option
    ORDER BY run, grouped_step, place;

CREATE OR REPLACE MACRO verl_rs_steps(a, b, rollout_rs, rollout_rs_threshold) AS TABLE
    SELECT * FROM verl_rs_groups(a, b, true, rollout_rs, rollout_rs_threshold);

CREATE OR REPLACE MACRO verl_rs_runs(a, b, rollout_rs, rollout_rs_threshold) AS TABLE
    SELECT * EXCLUDE (step) FROM verl_rs_groups(a, b, false, rollout_rs, rollout_rs_threshold);

-- verl_rs_mask(...): one row per response token; keep is true if the token is unmasked and every option keeps it, NULL if a
-- pass has no logprob for it.
CREATE OR REPLACE MACRO verl_rs_mask(a, b, rollout_rs, rollout_rs_threshold) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, position, mask,
           CASE WHEN NOT mask THEN false
                WHEN d IS NOT NULL THEN coalesce(kept, true) AND verl_kept(-d, k1_lower, k1_upper)
                     AND verl_kept(0.5 * d * d, NULL, k2_upper) AND verl_kept(expm1_minus(d), NULL, k3_upper)
                END AS keep
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, position, mask, verl_clamped(d) AS d
        FROM pair(a, b)
    )
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, bool_and(num_rejected = 0) AS kept
        FROM verl_rs_rows(a, b, rollout_rs, rollout_rs_threshold)
        WHERE taken_over <> 'token'
        GROUP BY ALL
    ) USING (run, step, seq_id, iteration_a, iteration_b)
    CROSS JOIN (
        SELECT max(lower) FILTER (option = 'token_k1') AS k1_lower, max(upper) FILTER (option = 'token_k1') AS k1_upper,
               max(upper) FILTER (option = 'token_k2') AS k2_upper, max(upper) FILTER (option = 'token_k3') AS k3_upper
        FROM verl_rs_options(rollout_rs, rollout_rs_threshold)
    );

-- verl_rs_masked(...): share of tokens rejected by any option, and share of all sequences of the batch that lose a token.
CREATE OR REPLACE MACRO verl_rs_masked(a, b, by_step, rollout_rs, rollout_rs_threshold) AS TABLE
    SELECT run, grouped_step AS step,
           sum(num_rejected) / sum(num_tokens) AS "rollout_corr/rollout_rs_masked_fraction",
           avg((coalesce(num_rejected, 0) > 0)::INTEGER) AS "rollout_corr/rollout_rs_seq_masked_fraction"
    FROM (SELECT *, CASE WHEN by_step THEN step END AS grouped_step FROM verl_sequences(a, b))
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) FILTER (NOT keep) AS num_rejected
        FROM verl_rs_mask(a, b, rollout_rs, rollout_rs_threshold)
        WHERE mask AND keep IS NOT NULL
        GROUP BY ALL
    ) USING (run, step, seq_id, iteration_a, iteration_b)
    GROUP BY run, grouped_step
    ORDER BY run, grouped_step;
