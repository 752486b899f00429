-- One value per response token: whether the loss counts the token, and its advantage.
CREATE OR REPLACE MACRO token_mask(response_mask, num) AS coalesce(response_mask, list_resize([]::BOOLEAN[], num, true));
CREATE OR REPLACE MACRO token_advantages(advantages, advantage, num) AS
    coalesce(advantages::DOUBLE[], list_resize([]::DOUBLE[], num, advantage));

-- scored_by_both(a, b): sequences that both passes scored, with the columns of both rows of scores as iteration_a, iteration_b, ...
CREATE OR REPLACE MACRO scored_by_both(a, b) AS TABLE
    SELECT s.*, COLUMNS(scores_a.*) AS '\0_a', COLUMNS(scores_b.*) AS '\0_b'
    FROM sequences AS s
    JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
    JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id
    WHERE scores_a."pass" = a AND scores_b."pass" = b;

-- pair(a, b): one row per response token of sequences that both passes scored; d = logprob(a) - logprob(b), nats.
-- logprob_a, logprob_b and d are NULL if a pass has no value for the token; mask is true if the loss counts it.
-- Token ids are indexed rather than unnested, because DuckDB reads every unnested list even if a query ignores it.
CREATE OR REPLACE MACRO pair(a, b) AS TABLE
    SELECT run, step, seq_id, group_id, iteration_a, iteration_b, position, response_ids[position + 1] AS token_id, mask, advantage,
           logprob_a, logprob_b, logprob_a::DOUBLE - logprob_b::DOUBLE AS d
    FROM (
        SELECT run, step, seq_id, group_id, response_ids, iteration_a, iteration_b,
               unnest(range(num_response_tokens::BIGINT)) AS position,
               unnest(token_mask(response_mask, num_response_tokens)) AS mask,
               unnest(token_advantages(advantages, advantage, num_response_tokens)) AS advantage,
               unnest(logprobs_a) AS logprob_a, unnest(logprobs_b) AS logprob_b
        FROM scored_by_both(a, b)
    );

-- counted_pair(a, b): the tokens of pair(a, b) that the loss counts and that both passes scored. If a and b are the same pass,
-- each inner iteration is paired with itself.
CREATE OR REPLACE MACRO counted_pair(a, b) AS TABLE
    FROM pair(a, b) WHERE mask AND d IS NOT NULL AND (a <> b OR iteration_a = iteration_b);
