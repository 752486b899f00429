-- The numbers of verl 0.9.0 under its own names: compute_offpolicy_metrics of verl/trainer/ppo/rollout_corr_helper.py and
-- calculate_debug_metrics of verl/utils/debug/metrics.py. Pass a is the trainer (old_log_probs), b the rollout.
--   Token means are over the tokens that count in the loss. Means over sequences are over all of the batch: one that is
--   masked as a whole takes part with a mean logprob of 0. NaN and infinities inside of the mask pass through.
--   kl = mean(-d); k3_kl = mean(exp(d) - 1 - d), not clamped; chi2_token clamps d, chi2_seq the sum of d, to 20 nats;
--   log_ppl_diff is of the means over a sequence's tokens, rollout less trainer: above 0 the trainer is less confident.
CREATE OR REPLACE MACRO verl_clamped(x) AS CASE WHEN isnan(x) THEN x ELSE greatest(least(x, 20.0), -20.0) END;

-- min and max that give NaN where one value is NaN, as torch's do.
CREATE OR REPLACE MACRO torch_min(x) AS CASE WHEN bool_or(isnan(x)) THEN 'NaN'::DOUBLE ELSE min(x) END;
CREATE OR REPLACE MACRO torch_max(x) AS CASE WHEN bool_or(isnan(x)) THEN 'NaN'::DOUBLE ELSE max(x) END;

CREATE OR REPLACE MACRO verl_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprob_a::DOUBLE AS old, logprob_b::DOUBLE AS rollout, d,
           exp(logprob_a::DOUBLE) AS old_prob, exp(logprob_b::DOUBLE) AS rollout_prob
    FROM pair(a, b)
    WHERE mask AND logprob_a IS NOT NULL AND logprob_b IS NOT NULL;

-- Of every sequence that both passes scored: means of its tokens' logprobs, and the sum of d.
CREATE OR REPLACE MACRO verl_sequences(a, b) AS TABLE
    SELECT scores_a.run, scores_a.step, scores_a.seq_id,
           coalesce(mean_old, 0.0) AS mean_old, coalesce(mean_rollout, 0.0) AS mean_rollout, coalesce(sum_d, 0.0) AS sum_d
    FROM scores AS scores_a
    JOIN scores AS scores_b
      ON scores_b.run = scores_a.run AND scores_b.step = scores_a.step AND scores_b.seq_id = scores_a.seq_id
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b,
               avg(old) AS mean_old, avg(rollout) AS mean_rollout, sum(d) AS sum_d
        FROM verl_tokens(a, b)
        GROUP BY ALL
    ) AS means
      ON means.run = scores_a.run AND means.step = scores_a.step AND means.seq_id = scores_a.seq_id
     AND means.iteration_a = scores_a.iteration AND means.iteration_b = scores_b.iteration
    WHERE scores_a."pass" = a AND scores_b."pass" = b;

-- A row a step, or a run with step NULL.
CREATE OR REPLACE MACRO verl_groups(a, b, by_step) AS TABLE
    SELECT sequences.run, sequences.step,
           training_ppl AS "rollout_corr/training_ppl", training_log_ppl AS "rollout_corr/training_log_ppl",
           kl AS "rollout_corr/kl", k3_kl AS "rollout_corr/k3_kl",
           rollout_ppl AS "rollout_corr/rollout_ppl", rollout_log_ppl AS "rollout_corr/rollout_log_ppl",
           log_ppl_diff AS "rollout_corr/log_ppl_diff", log_ppl_abs_diff AS "rollout_corr/log_ppl_abs_diff",
           log_ppl_diff_max AS "rollout_corr/log_ppl_diff_max", log_ppl_diff_min AS "rollout_corr/log_ppl_diff_min",
           ppl_ratio AS "rollout_corr/ppl_ratio",
           chi2_token AS "rollout_corr/chi2_token", chi2_seq AS "rollout_corr/chi2_seq",
           diff_max AS "training/rollout_probs_diff_max", diff_mean AS "training/rollout_probs_diff_mean",
           diff_std AS "training/rollout_probs_diff_std", pearson AS "training/rollout_actor_probs_pearson_corr"
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step,
               avg(exp(-mean_old)) AS training_ppl, avg(-mean_old) AS training_log_ppl,
               avg(exp(-mean_rollout)) AS rollout_ppl, avg(-mean_rollout) AS rollout_log_ppl,
               avg(mean_rollout - mean_old) AS log_ppl_diff, avg(abs(mean_rollout - mean_old)) AS log_ppl_abs_diff,
               torch_max(mean_rollout - mean_old) AS log_ppl_diff_max,
               torch_min(mean_rollout - mean_old) AS log_ppl_diff_min,
               avg(exp(mean_rollout - mean_old)) AS ppl_ratio,
               avg(exp(2 * verl_clamped(sum_d))) - 1 AS chi2_seq
        FROM verl_sequences(a, b)
        GROUP BY ALL
    ) AS sequences
    JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step,
               avg(-d) AS kl, avg(expm1_minus(d)) AS k3_kl, avg(exp(2 * verl_clamped(d))) - 1 AS chi2_token,
               torch_max(abs(old_prob - rollout_prob)) AS diff_max, avg(abs(old_prob - rollout_prob)) AS diff_mean,
               CASE WHEN bool_and(isfinite(old_prob) AND isfinite(rollout_prob))
                    THEN stddev_samp(abs(old_prob - rollout_prob)) FILTER (isfinite(old_prob) AND isfinite(rollout_prob))
                    ELSE 'NaN'::DOUBLE END AS diff_std,
               CASE WHEN bool_and(isfinite(old_prob) AND isfinite(rollout_prob))
                    THEN corr(old_prob, rollout_prob) FILTER (isfinite(old_prob) AND isfinite(rollout_prob))
                    ELSE 'NaN'::DOUBLE END AS pearson
        FROM verl_tokens(a, b)
        GROUP BY ALL
    ) AS tokens ON tokens.run = sequences.run AND tokens.step IS NOT DISTINCT FROM sequences.step
    ORDER BY sequences.run, sequences.step;

CREATE OR REPLACE MACRO verl_steps(a, b) AS TABLE
    SELECT * FROM verl_groups(a, b, true);

CREATE OR REPLACE MACRO verl_runs(a, b) AS TABLE
    SELECT * EXCLUDE (step) FROM verl_groups(a, b, false);
