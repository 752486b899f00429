-- pair_distributions(a, b): one row per response token whose distribution both passes captured; nats, see docs/reference/sql.md.
-- compare_distributions is a Python function that is called with at most 128 tokens of a sequence at a time.
CREATE OR REPLACE MACRO pair_distributions(a, b) AS TABLE
    SELECT run, step, seq_id, group_id, iteration_a, iteration_b, position, token_id, mask,
           {measures}
    FROM (
        SELECT run, step, seq_id, group_id, iteration_a, iteration_b,
               unnest(range(first, first + num_tokens)) AS position,
               unnest(response_ids[first + 1 : first + num_tokens]) AS token_id,
               unnest(token_mask(response_mask[first + 1 : first + num_tokens], num_tokens)) AS mask,
               unnest(compare_distributions(run, num_tokens,
                                            dense_a, start_a + first, contract_a, policy_version_a, attempt_a,
                                            dense_b, start_b + first, contract_b, policy_version_b, attempt_b)) AS measured
        FROM (
            SELECT s.run, s.step, s.seq_id, s.group_id,
                   scores_a.iteration AS iteration_a, scores_b.iteration AS iteration_b,
                   s.response_ids, s.response_mask, pieces.first,
                   least(s.num_response_tokens - pieces.first, 128)::BIGINT AS num_tokens,
                   scores_a.dense AS dense_a, scores_a.dense_start AS start_a, scores_a.contract AS contract_a,
                   scores_a.policy_version AS policy_version_a, scores_a.attempt AS attempt_a,
                   scores_b.dense AS dense_b, scores_b.dense_start AS start_b, scores_b.contract AS contract_b,
                   scores_b.policy_version AS policy_version_b, scores_b.attempt AS attempt_b
            FROM sequences AS s
            JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
            JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id,
            LATERAL (SELECT unnest(range(0, s.num_response_tokens::BIGINT, 128)) AS first) AS pieces
            WHERE scores_a."pass" = a AND scores_b."pass" = b
              AND scores_a.dense IS NOT NULL AND scores_b.dense IS NOT NULL
        )
    );

-- num_captured(a, b): number of sequences with captured distributions in both passes; the distributions are not read.
CREATE OR REPLACE MACRO num_captured(a, b) AS TABLE
    SELECT count(*) AS num_captured
    FROM (SELECT run, step, seq_id FROM scores WHERE "pass" = a AND dense IS NOT NULL)
    JOIN (SELECT run, step, seq_id FROM scores WHERE "pass" = b AND dense IS NOT NULL) USING (run, step, seq_id);

-- Statistics of pair_distributions over the tokens that count toward the loss, by sequence, step or run. Means and maxima are NULL
-- unless all tokens have exact values; bounds are never NULL.
CREATE OR REPLACE MACRO distribution_groups(a, b, by_step, by_sequence) AS TABLE
    SELECT run,
           CASE WHEN by_step THEN step END AS step,
           CASE WHEN by_sequence THEN seq_id END AS seq_id,
           CASE WHEN by_sequence THEN iteration_a END AS iteration_a,
           CASE WHEN by_sequence THEN iteration_b END AS iteration_b,
           count(*) AS num_distributions,
           CASE WHEN count(tv) = count(*) THEN average(tv) END AS mean_tv,
           CASE WHEN count(tv) = count(*) THEN max(tv) END AS max_tv,
           CASE WHEN count(js) = count(*) THEN average(js) END AS mean_js,
           CASE WHEN count(js) = count(*) THEN max(js) END AS max_js,
           CASE WHEN count(kl_ab) = count(*) THEN average(kl_ab) END AS mean_kl_ab,
           CASE WHEN count(kl_ab) = count(*) THEN max(kl_ab) END AS max_kl_ab,
           CASE WHEN count(kl_ba) = count(*) THEN average(kl_ba) END AS mean_kl_ba,
           CASE WHEN count(kl_ba) = count(*) THEN max(kl_ba) END AS max_kl_ba,
           avg(argmax_flip::INTEGER) AS share_argmax_flips,
           CASE WHEN count(tv) = count(*) THEN sum(num_unsupported_ab)::BIGINT END AS num_unsupported_ab,
           CASE WHEN count(tv) = count(*) THEN sum(num_unsupported_ba)::BIGINT END AS num_unsupported_ba,
           average(tv_low) AS mean_tv_low, average(tv_high) AS mean_tv_high,
           max(tv_low) AS max_tv_low, max(tv_high) AS max_tv_high,
           average(js_low) AS mean_js_low, average(js_high) AS mean_js_high,
           max(js_low) AS max_js_low, max(js_high) AS max_js_high,
           average(kl_ab_low) AS mean_kl_ab_low, average(kl_ab_high) AS mean_kl_ab_high,
           max(kl_ab_low) AS max_kl_ab_low, max(kl_ab_high) AS max_kl_ab_high,
           average(kl_ba_low) AS mean_kl_ba_low, average(kl_ba_high) AS mean_kl_ba_high,
           max(kl_ba_low) AS max_kl_ba_low, max(kl_ba_high) AS max_kl_ba_high
    FROM pair_distributions(a, b)
    WHERE mask
    GROUP BY ALL
    ORDER BY ALL;

CREATE OR REPLACE MACRO pair_distribution_sequences(a, b) AS TABLE
    SELECT * FROM distribution_groups(a, b, true, true);

CREATE OR REPLACE MACRO pair_distribution_steps(a, b) AS TABLE
    SELECT * EXCLUDE (seq_id, iteration_a, iteration_b) FROM distribution_groups(a, b, true, false);

CREATE OR REPLACE MACRO pair_distribution_runs(a, b) AS TABLE
    SELECT * EXCLUDE (step, seq_id, iteration_a, iteration_b) FROM distribution_groups(a, b, false, false);
