-- The numbers of slime 0.3.1: policy_loss_function and vanilla_tis_function of slime/backends/megatron_utils/loss.py,
-- reduced by get_sum_of_sample_mean and reduce_train_step_metrics of cp_utils.py. Pass a is the trainer (log_probs at the
-- sampling weights), b the rollout; d = a - b over the tokens that count in the loss.
--   Each is the mean over sequences of its mean over tokens; a sequence without a token has 0, and counts. With
--   calculate_per_token_loss it is the sum over tokens by their number, where a sequence without a token counts as one.
--   tis = exp(d), not cut; tis_clipfrac = share of tis outside of [tis_clip_low, tis_clip]; tis_abs = |tis - 1|.
--   ppo_kl = mean of old less current, ois = mean of exp(current - old), of the passes a and current; NULL without current.
-- slime takes its means over rollouts of several samples; here every sequence is a rollout of its own.

-- slime_mean(...): of each number, its mean by what slime counts.
CREATE OR REPLACE MACRO slime_mean(total, num_tokens, calculate_per_token_loss) AS
    sum(CASE WHEN calculate_per_token_loss THEN total ELSE total / greatest(num_tokens, 1) END)
    / sum(CASE WHEN calculate_per_token_loss THEN greatest(num_tokens, 1) ELSE 1 END);

-- slime_tokens(a, b): d of the tokens that count.
CREATE OR REPLACE MACRO slime_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, d
    FROM pair(a, b)
    WHERE mask AND d IS NOT NULL;

CREATE OR REPLACE MACRO slime_groups(a, b, by_step, tis_clip, tis_clip_low, calculate_per_token_loss) AS TABLE
    SELECT found.run, found.step, train_rollout_logprob_abs_diff, tis, tis_clipfrac, tis_abs, ppo_kl, ois
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(num_tokens) AS total_tokens,
               slime_mean(coalesce(sum_abs_d, 0.0), coalesce(num_tokens, 0), calculate_per_token_loss)
                   AS train_rollout_logprob_abs_diff,
               slime_mean(coalesce(sum_tis, 0.0), coalesce(num_tokens, 0), calculate_per_token_loss) AS tis,
               slime_mean(coalesce(num_outside, 0), coalesce(num_tokens, 0), calculate_per_token_loss) AS tis_clipfrac,
               slime_mean(coalesce(sum_tis_abs, 0.0), coalesce(num_tokens, 0), calculate_per_token_loss) AS tis_abs
        FROM pair_keys(a, b, NULL, NULL, NULL)
        LEFT JOIN (
            SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, sum(abs(d)) AS sum_abs_d,
                   sum(exp(d)) AS sum_tis, sum(abs(expm1(d))) AS sum_tis_abs,
                   count(*) FILTER (isnan(d) OR exp(d) < tis_clip_low OR exp(d) > tis_clip) AS num_outside
            FROM slime_tokens(a, b)
            GROUP BY ALL
        ) USING (run, step, seq_id, iteration_a, iteration_b)
        GROUP BY ALL
    ) AS found
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step,
               slime_mean(coalesce(sum_kl, 0.0), coalesce(num_tokens, 0), calculate_per_token_loss) AS ppo_kl,
               slime_mean(coalesce(sum_ois, 0.0), coalesce(num_tokens, 0), calculate_per_token_loss) AS ois
        FROM pair_keys('current', a, NULL, NULL, NULL)
        LEFT JOIN (
            SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, sum(-d) AS sum_kl,
                   sum(exp(d)) AS sum_ois
            FROM slime_tokens('current', a)
            GROUP BY ALL
        ) USING (run, step, seq_id, iteration_a, iteration_b)
        GROUP BY ALL
    ) AS currently ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    WHERE total_tokens > 0
    ORDER BY found.run, found.step;

CREATE OR REPLACE MACRO slime_steps(
    a, b, tis_clip := 2.0, tis_clip_low := 0.0, calculate_per_token_loss := false
) AS TABLE
    SELECT * FROM slime_groups(a, b, true, tis_clip::DOUBLE, tis_clip_low::DOUBLE, calculate_per_token_loss);

CREATE OR REPLACE MACRO slime_runs(
    a, b, tis_clip := 2.0, tis_clip_low := 0.0, calculate_per_token_loss := false
) AS TABLE
    SELECT * EXCLUDE (step)
    FROM slime_groups(a, b, false, tis_clip::DOUBLE, tis_clip_low::DOUBLE, calculate_per_token_loss);
