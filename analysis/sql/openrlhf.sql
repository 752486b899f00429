-- The numbers of OpenRLHF 0.11.0: PolicyLoss of openrlhf/models/loss.py, averaged over tokens as ppo_train of
-- openrlhf/trainer/ray/ppo_actor.py does. Pass a is the trainer (old_log_probs), b vLLM (rollout_log_probs).
--   vllm_kl = mean of b - a over the tokens that count in the loss: k1, signed.
--   ppo_kl = mean of a - current over the same; NULL without the pass current.
CREATE OR REPLACE MACRO openrlhf_mean(a, b, by_step) AS TABLE
    SELECT run, CASE WHEN by_step THEN step END AS step, avg(-d) AS kl
    FROM pair(a, b)
    WHERE mask AND d IS NOT NULL
    GROUP BY ALL;

CREATE OR REPLACE MACRO openrlhf_groups(a, b, by_step) AS TABLE
    SELECT found.run, found.step, found.kl AS vllm_kl, currently.kl AS ppo_kl
    FROM openrlhf_mean(a, b, by_step) AS found
    LEFT JOIN openrlhf_mean('current', a, by_step) AS currently
           ON currently.run = found.run AND currently.step IS NOT DISTINCT FROM found.step
    ORDER BY found.run, found.step;

CREATE OR REPLACE MACRO openrlhf_steps(a, b) AS TABLE
    SELECT * FROM openrlhf_groups(a, b, true);

CREATE OR REPLACE MACRO openrlhf_runs(a, b) AS TABLE
    SELECT * EXCLUDE (step) FROM openrlhf_groups(a, b, false);
