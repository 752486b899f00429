-- Views over the tables of the trace.

-- steps: one row per step, from the sequences and the trainer's logged values.
CREATE OR REPLACE VIEW steps AS
    SELECT run, step, num_sequences, num_tokens, mean_response_tokens, max_response_tokens, share_length_limited,
           mean_reward, std_reward, mean_advantage, first_policy_version, last_policy_version,
           loss, learning_rate, grad_norm
    FROM (
        SELECT run, step, count(*) AS num_sequences, sum(num_response_tokens)::BIGINT AS num_tokens,
               avg(num_response_tokens) AS mean_response_tokens,
               max(num_response_tokens) AS max_response_tokens,
               avg((finish_reason = 'length')::INTEGER) AS share_length_limited, avg(reward) AS mean_reward,
               stddev_samp(reward) AS std_reward, avg(advantage) AS mean_advantage,
               min(policy_version) AS first_policy_version, max(policy_version) AS last_policy_version
        FROM sequences
        GROUP BY run, step
    )
    LEFT JOIN (
        SELECT run, step, any_value(value) FILTER (name = 'loss') AS loss,
               any_value(value) FILTER (name = 'learning_rate') AS learning_rate,
               any_value(value) FILTER (name = 'grad_norm') AS grad_norm
        FROM metrics
        WHERE name IN ('loss', 'learning_rate', 'grad_norm')
        GROUP BY run, step
    ) USING (run, step)
    ORDER BY run, step;

-- tokens: one row per response token with the values of the engine and the trainer; NULL if missing.
CREATE OR REPLACE VIEW tokens AS
    SELECT run, step, seq_id, group_id, position, token_id, mask, rollout_logprob, train_logprob,
           train_logprob::DOUBLE - rollout_logprob::DOUBLE AS d, advantage
    FROM (
        SELECT s.run, s.step, s.seq_id, s.group_id, unnest(range(s.num_response_tokens::BIGINT)) AS position,
               unnest(s.response_ids) AS token_id,
               unnest(token_mask(s.response_mask, s.num_response_tokens)) AS mask,
               unnest(rollout.logprobs) AS rollout_logprob, unnest(train.logprobs) AS train_logprob,
               unnest(token_advantages(s.advantages, s.advantage, s.num_response_tokens)) AS advantage
        FROM sequences AS s
        LEFT JOIN (SELECT run, step, seq_id, logprobs FROM scores WHERE "pass" = 'rollout') AS rollout
               ON rollout.run = s.run AND rollout.step = s.step AND rollout.seq_id = s.seq_id
        LEFT JOIN (SELECT run, step, seq_id, logprobs FROM scores WHERE "pass" = 'train') AS train
               ON train.run = s.run AND train.step = s.step AND train.seq_id = s.seq_id
    );
