-- pair(a, b): one row per response token of sequences that both passes scored; d = logprob(a) - logprob(b), nats.
-- logprob_a, logprob_b and d are NULL if a pass has no value for the token; mask is true if the loss counts it.
-- Token ids are indexed rather than unnested, because DuckDB reads every unnested list even if a query ignores it.
CREATE OR REPLACE MACRO pair(a, b) AS TABLE
    SELECT run, step, seq_id, group_id, iteration_a, iteration_b, position, response_ids[position + 1] AS token_id, mask, advantage,
           logprob_a, logprob_b, logprob_a::DOUBLE - logprob_b::DOUBLE AS d
    FROM (
        SELECT s.run, s.step, s.seq_id, s.group_id, s.response_ids,
               scores_a.iteration AS iteration_a, scores_b.iteration AS iteration_b,
               unnest(range(s.num_response_tokens::BIGINT)) AS position,
               unnest(coalesce(s.response_mask, list_resize([]::BOOLEAN[], s.num_response_tokens, true))) AS mask,
               unnest(coalesce(s.advantages::DOUBLE[], list_resize([]::DOUBLE[], s.num_response_tokens, s.advantage))) AS advantage,
               unnest(scores_a.logprobs) AS logprob_a, unnest(scores_b.logprobs) AS logprob_b
        FROM sequences AS s
        JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
        JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id
        WHERE scores_a."pass" = a AND scores_b."pass" = b
    );
