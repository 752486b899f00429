-- OpenRLHF 0.11.0's metrics: PolicyLoss of openrlhf/models/loss.py, averaged over tokens as in ppo_train of
-- openrlhf/trainer/ray/ppo_actor.py. Pass a is the trainer (old_log_probs), pass b vLLM (rollout_log_probs).
--   vllm_kl = mean of b - a over unmasked tokens: k1, signed.
--   ppo_kl = mean of a - current over unmasked tokens. ppo_clip_ratio = share of unmasked tokens for which clipping the ratio
--   lowers ratio * advantage. The ratio is exp(current - a), clamped to 20 nats; for gspo, exp of the sequence's mean of
--   current - a, or of current - b with is_correction_enable. Both are NULL without the `current` pass.
-- OpenRLHF multiplies by the mask; here, masked tokens are left out regardless of their logprob.

-- openrlhf_rows(a, b) and openrlhf_updates(a): per-sequence sums over passes a and b, and over `current` and a.
CREATE OR REPLACE MACRO openrlhf_rows(a, b) AS TABLE
    SELECT run, step, seq_id, count(*) AS num_tokens, sum(-d) AS sum_kl
    FROM pair(a, b)
    WHERE mask AND d IS NOT NULL
    GROUP BY run, step, seq_id, iteration_a, iteration_b;

CREATE OR REPLACE MACRO openrlhf_updates(a) AS TABLE
    SELECT run, step, seq_id, count(*) AS num_tokens, sum(-d) AS sum_kl
    FROM pair('current', a)
    WHERE mask AND d IS NOT NULL
    GROUP BY run, step, seq_id, iteration_a, iteration_b;

-- openrlhf_ratios(old, ...): one row per token and inner iteration, with the ratio of the `current` pass to `old`. If `old` is
-- the `current` pass, each iteration is paired with itself.
CREATE OR REPLACE MACRO openrlhf_ratios(old, policy_loss_type) AS TABLE
    SELECT run, step, seq_id, advantage,
           exp(CASE policy_loss_type WHEN 'ppo' THEN torch_clamp(d, -20.0, 20.0) WHEN 'gspo' THEN mean_d
                                     ELSE error('policy_loss_type: ppo or gspo') END) AS ratio
    FROM (
        SELECT run, step, seq_id, advantage, d, avg(d) OVER (PARTITION BY run, step, seq_id, iteration_a, iteration_b) AS mean_d
        FROM counted_pair('current', old)
    );

-- openrlhf_clips(...): numbers of clipped tokens and of tokens with an advantage, per sequence. Comparisons with
-- NaN are false.
CREATE OR REPLACE MACRO openrlhf_clips(a, b, policy_loss_type, eps_clip_low_high, is_correction_enable) AS TABLE
    SELECT run, step, seq_id, count(*) AS num_tokens, count(advantage) AS num_known,
           count(*) FILTER (NOT isnan(unclipped) AND NOT isnan(clipped) AND clipped < unclipped) AS num_clipped
    FROM (
        SELECT run, step, seq_id, advantage, ratio * advantage AS unclipped,
               torch_clamp(ratio, 1 - eps_clip_low_high[1], 1 + eps_clip_low_high[2]) * advantage AS clipped
        FROM openrlhf_ratios(CASE WHEN policy_loss_type = 'gspo' AND is_correction_enable THEN b ELSE a END,
                             policy_loss_type)
    )
    GROUP BY ALL;

CREATE OR REPLACE MACRO openrlhf_numbers(
    a, b, by_step, policy_loss_type, eps_clip_low_high, is_correction_enable
) AS TABLE
    SELECT found.run, found.step, found.kl AS vllm_kl, currently.kl AS ppo_kl, clips.clip_ratio AS ppo_clip_ratio
    FROM (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(sum_kl) / sum(num_tokens) AS kl
        FROM openrlhf_rows(a, b)
        GROUP BY ALL
    ) AS found
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, sum(sum_kl) / sum(num_tokens) AS kl
        FROM openrlhf_updates(a)
        GROUP BY ALL
    ) AS currently ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    LEFT JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step,
               -- NULL for tokens without an advantage.
               CASE WHEN sum(num_known) = sum(num_tokens) THEN sum(num_clipped) / sum(num_tokens) END AS clip_ratio
        FROM openrlhf_clips(a, b, policy_loss_type, eps_clip_low_high, is_correction_enable)
        GROUP BY ALL
    ) AS clips ON clips.run = found.run AND clips.step IS NOT DISTINCT FROM found.step
    ORDER BY found.run, found.step;
