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
                                            dense_a, dense_start_a + first, contract_a, policy_version_a, attempt_a,
                                            dense_b, dense_start_b + first, contract_b, policy_version_b, attempt_b)) AS measured
        FROM (
            SELECT s.*, pieces.first, least(num_response_tokens - pieces.first, 128)::BIGINT AS num_tokens
            FROM scored_by_both(a, b) AS s,
            LATERAL (SELECT unnest(range(0, s.num_response_tokens::BIGINT, 128)) AS first) AS pieces
            WHERE dense_a IS NOT NULL AND dense_b IS NOT NULL
        )
    );

-- Statistics of pair_distributions over the tokens that count toward the loss, by sequence, step or run. Means and maxima are NULL
-- unless all tokens have exact values; bounds are never NULL.
CREATE OR REPLACE MACRO distribution_groups(a, b, by_step, by_sequence) AS TABLE
    SELECT run,
           CASE WHEN by_step THEN step END AS step,
           CASE WHEN by_sequence THEN seq_id END AS seq_id,
           CASE WHEN by_sequence THEN iteration_a END AS iteration_a,
           CASE WHEN by_sequence THEN iteration_b END AS iteration_b,
           count(*) AS num_distributions,
           {exact},
           avg(argmax_flip::INTEGER) AS share_argmax_flips,
           CASE WHEN count(tv) = count(*) THEN sum(num_unsupported_ab)::BIGINT END AS num_unsupported_ab,
           CASE WHEN count(tv) = count(*) THEN sum(num_unsupported_ba)::BIGINT END AS num_unsupported_ba,
           {bounds}
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
