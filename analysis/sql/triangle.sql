-- triangle(a, b, c): one row per response token that the loss counts and that has a finite logprob in all three passes.
CREATE OR REPLACE MACRO triangle(a, b, c) AS TABLE
    SELECT run, step, seq_id, position, logprob_a::DOUBLE AS logprob_a, logprob_b::DOUBLE AS logprob_b,
           logprob_c::DOUBLE AS logprob_c
    FROM (
        SELECT s.run, s.step, s.seq_id, unnest(range(s.num_response_tokens::BIGINT)) AS position,
               unnest(coalesce(s.response_mask, list_resize([]::BOOLEAN[], s.num_response_tokens, true))) AS mask,
               unnest(scores_a.logprobs) AS logprob_a, unnest(scores_b.logprobs) AS logprob_b,
               unnest(scores_c.logprobs) AS logprob_c
        FROM sequences AS s
        JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
        JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id
        JOIN scores AS scores_c ON scores_c.run = s.run AND scores_c.step = s.step AND scores_c.seq_id = s.seq_id
        WHERE scores_a."pass" = a AND scores_b."pass" = b AND scores_c."pass" = c
    )
    WHERE mask AND isfinite(logprob_a) AND isfinite(logprob_b) AND isfinite(logprob_c);
