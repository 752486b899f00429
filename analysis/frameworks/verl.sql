-- verl 0.9.0's off-policy metrics under its own names: compute_offpolicy_metrics of
-- verl/trainer/ppo/rollout_corr_helper.py and calculate_debug_metrics of verl/utils/debug/metrics.py. Pass a is the
-- trainer (old_log_probs), b the rollout.
--   Token means are over unmasked tokens. Sequence means are over the whole batch, in which a fully masked sequence has a mean
--   logprob of 0. NaN and infinities of unmasked tokens propagate.
--   kl = mean(-d); k3_kl = mean(exp(d) - 1 - d), not clamped; chi2_token clamps d, chi2_seq the sum of d, to 20 nats;
--   log_ppl_diff = a sequence's mean rollout logprob minus its mean trainer logprob: above 0, the trainer is less confident.

-- verl_rows(a, b): sequences that both passes scored, with logprobs and mask; an empty mask masks no token.
CREATE OR REPLACE MACRO verl_rows(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprobs_a AS old, logprobs_b AS rollout,
           coalesce(response_mask, []::BOOLEAN[]) AS mask
    FROM scored_by_both(a, b)
    WHERE logprobs_a IS NOT NULL AND logprobs_b IS NOT NULL;

-- verl_summed(a, b): sums of each sequence.
CREATE OR REPLACE MACRO verl_summed(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, sums.*
    FROM (SELECT * EXCLUDE (old, rollout, mask), verl_sums(old, rollout, mask) AS sums FROM verl_rows(a, b));

CREATE OR REPLACE MACRO verl_numbers(a, b, by_step) AS TABLE
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
               mean_in_order(expm1(2 * torch_clamp(sum_d, -20.0, 20.0)), place) AS chi2_seq,
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
                -- NULL for a sequence without tokens, so that the aggregates below ignore it.
                SELECT *, CASE WHEN num_tokens > 0 THEN fall_from(top_a, peak_a, mean_fall_a) END AS fall_a,
                       CASE WHEN num_tokens > 0 THEN fall_from(top_b, peak_b, mean_fall_b) END AS fall_b
                FROM (
                    SELECT *, max(CASE WHEN num_tokens > 0 THEN peak_a END) OVER grouped AS top_a,
                           max(CASE WHEN num_tokens > 0 THEN peak_b END) OVER grouped AS top_b
                    FROM (
                        SELECT *, CASE WHEN by_step THEN step END AS grouped_step,
                               row_number() OVER (ORDER BY run, step, seq_id, iteration_a, iteration_b) AS place,
                               -- Mean logprobs, 0 for a sequence without tokens.
                               sum_old / greatest(num_tokens, 1) AS mean_old,
                               sum_rollout / greatest(num_tokens, 1) AS mean_rollout
                        FROM verl_summed(a, b)
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
