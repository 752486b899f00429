-- Agreement between two passes on the router's choices. A token counts in a layer if both passes recorded its routing there.

-- routed_rows(a, b): where the choices are stored, for sequences that have them in both passes.
CREATE OR REPLACE MACRO routed_rows(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, num_prompt_tokens::BIGINT AS num_prompt_tokens,
           num_response_tokens::BIGINT AS num_response_tokens, contract_a AS contract,
           routing_a AS group_a, routing_start_a AS start_a, routing_b AS group_b, routing_start_b AS start_b
    FROM scored_by_both(a, b)
    WHERE routing_a IS NOT NULL AND routing_b IS NOT NULL;

-- routing_sums(a, b): one row per (sequence, layer). Layers with a router are numbered as in the contract of pass a, or from 0.
CREATE OR REPLACE MACRO routing_sums(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, coalesce(layers[place], place - 1) AS layer,
           found.num_tokens, found.num_same_experts, found.num_same_order, found.sum_overlap,
           found.num_weights, found.sum_abs_dweight
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, contract,
               unnest(sums) AS found, unnest(range(1, len(sums) + 1)) AS place
        FROM (
            SELECT *, routing_sums_of(run, group_a, start_a, group_b, start_b, num_prompt_tokens + num_response_tokens)
                   AS sums
            FROM routed_rows(a, b)
        )
    )
    LEFT JOIN (
        SELECT DISTINCT run, contract, (contract_json -> '$.model.moe_layers')::BIGINT[] AS layers FROM passes WHERE "pass" = a
    ) USING (run, contract);

-- routing_groups(a, b, by_step): one row per (run, step, layer), or per (run, layer) with step NULL.
CREATE OR REPLACE MACRO routing_groups(a, b, by_step) AS TABLE
    SELECT run, CASE WHEN by_step THEN step END AS step, layer, sum(num_tokens)::BIGINT AS num_tokens,
           sum(num_same_experts) / nullif(sum(num_tokens), 0) AS share_same_experts,
           sum(num_same_order) / nullif(sum(num_tokens), 0) AS share_same_order,
           fsum(sum_overlap) / nullif(sum(num_tokens), 0) AS mean_overlap,
           fsum(sum_abs_dweight) / nullif(sum(num_weights), 0) AS mean_abs_dweight
    FROM routing_sums(a, b)
    GROUP BY ALL
    ORDER BY ALL;

CREATE OR REPLACE MACRO pair_routing(a, b) AS TABLE
    SELECT * FROM routing_groups(a, b, true);

CREATE OR REPLACE MACRO pair_routing_layers(a, b) AS TABLE
    SELECT * EXCLUDE (step) FROM routing_groups(a, b, false);

-- pair_routing_tokens(a, b): one row per response token. Its logprob is computed at the previous token, so the routing
-- of the previous token is compared.
CREATE OR REPLACE MACRO pair_routing_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, position,
           found.num_layers AS num_layers, found.num_layers_differing AS num_layers_differing
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, num_response_tokens,
               unnest(counts) AS found, unnest(range(len(counts))) - num_prompt_tokens + 1 AS position
        FROM (
            SELECT *, routing_counts_of(run, group_a, start_a, group_b, start_b, num_prompt_tokens + num_response_tokens)
                   AS counts
            FROM routed_rows(a, b)
        )
    )
    WHERE position >= 0 AND position < num_response_tokens AND found.num_layers > 0;
