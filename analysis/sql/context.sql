-- Macros that join pairs of passes with other data on the same tokens.

-- pair_entropies(a, b): one row per response token, with the entropy and the gap between the two most probable tokens (nats),
-- from the first pass that recorded them: b, a, or `current` (at the loss's first use of the sequence).
CREATE OR REPLACE MACRO pair_entropies(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, position, mask, entropy, top2_gap,
           logprob_a::DOUBLE AS logprob_a, logprob_b::DOUBLE AS logprob_b, logprob_a::DOUBLE - logprob_b::DOUBLE AS d
    FROM (
        SELECT s.run, s.step, s.seq_id, iteration_a, iteration_b,
               unnest(range(num_response_tokens::BIGINT)) AS position,
               unnest(token_mask(response_mask, num_response_tokens)) AS mask,
               unnest(logprobs_a) AS logprob_a, unnest(logprobs_b) AS logprob_b,
               unnest(coalesce(entropy_b, entropy_a, loss.entropy))::DOUBLE AS entropy,
               unnest(coalesce(top2_gap_b, top2_gap_a, loss.top2_gap))::DOUBLE AS top2_gap
        FROM scored_by_both(a, b) AS s
        LEFT JOIN (
            SELECT run, step, seq_id, entropy, top2_gap FROM scores WHERE "pass" = 'current' AND iteration = 0
        ) AS loss ON loss.run = s.run AND loss.step = s.step AND loss.seq_id = s.seq_id
    );

-- pair_now(a, b, now): one row per (response token, inner iteration of pass now): d = logprob(a) - logprob(b), and
-- stale = logprob(now) - logprob(a); nats.
CREATE OR REPLACE MACRO pair_now(a, b, now) AS TABLE
    SELECT run, step, seq_id, group_id, iteration, position, mask, advantage, logprob_a, logprob_b, logprob_current,
           logprob_a - logprob_b AS d, logprob_current - logprob_a AS stale
    FROM (
        SELECT s.run, s.step, s.seq_id, s.group_id, scores_now.iteration,
               unnest(range(num_response_tokens::BIGINT)) AS position,
               unnest(token_mask(response_mask, num_response_tokens)) AS mask,
               unnest(token_advantages(advantages, advantage, num_response_tokens)) AS advantage,
               unnest(logprobs_a)::DOUBLE AS logprob_a, unnest(logprobs_b)::DOUBLE AS logprob_b,
               unnest(scores_now.logprobs)::DOUBLE AS logprob_current
        FROM scored_by_both(a, b) AS s
        JOIN scores AS scores_now ON scores_now.run = s.run AND scores_now.step = s.step AND scores_now.seq_id = s.seq_id
        WHERE scores_now."pass" = now
    );

-- pair_current(a, b): pair_now for the pass inside the loss; stale is the change due to updates since sampling.
CREATE OR REPLACE MACRO pair_current(a, b) AS TABLE SELECT * EXCLUDE (group_id) FROM pair_now(a, b, 'current');

-- triangle(a, b, c): one row per response token that the loss counts and that has a finite logprob in all three passes.
CREATE OR REPLACE MACRO triangle(a, b, c) AS TABLE
    SELECT run, step, seq_id, position, logprob_a, logprob_b, logprob_current AS logprob_c
    FROM pair_now(a, b, c)
    WHERE mask AND isfinite(d) AND isfinite(stale);

-- pair_responses(a, b): one row per response, with sums, means and maxima over its counted tokens with a finite d.
CREATE OR REPLACE MACRO pair_responses(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens, sum(d) AS sum_d, sum(abs(d)) AS sum_abs_d,
           avg(d) AS mean_d, max(d * d / 2) AS max_k2, avg(expm1_minus(d)) AS mean_k3,
           -avg(logprob_a::DOUBLE) AS log_ppl_a, -avg(logprob_b::DOUBLE) AS log_ppl_b
    FROM pair(a, b)
    WHERE mask AND isfinite(d)
    GROUP BY run, step, seq_id, iteration_a, iteration_b;

-- pair_neighbours(a, b): two responses to the same prompt in one step that begin with the same `shared` tokens. One row per
-- position at which both have a counted token; other_a and other_b are the logprobs of the second response.
CREATE OR REPLACE MACRO pair_neighbours(a, b) AS TABLE
    WITH neighbours AS (
        -- Sorted responses share their longest prefix with a neighbour.
        SELECT run, step, seq_id, before, common_prefix(response_ids, other) AS shared
        FROM (
            SELECT run, step, seq_id, response_ids, lag(seq_id) OVER response AS before, lag(response_ids) OVER response AS other
            FROM sequences
            WHERE prompt_ids IS NOT NULL
            WINDOW response AS (PARTITION BY run, step, prompt_ids ORDER BY response_ids, seq_id)
        )
        WHERE before IS NOT NULL
    ), counted AS (
        SELECT run, step, seq_id, iteration_a, iteration_b, position, logprob_a::DOUBLE AS a, logprob_b::DOUBLE AS b
        FROM pair(a, b)
        WHERE mask AND isfinite(d)
    )
    SELECT run, step, one.position, shared, one.a AS logprob_a, one.b AS logprob_b, two.a AS other_a, two.b AS other_b
    FROM neighbours
    JOIN counted AS one USING (run, step, seq_id)
    JOIN counted AS two ON two.run = one.run AND two.step = one.step AND two.seq_id = neighbours.before
         AND two.position = one.position AND two.iteration_a = one.iteration_a AND two.iteration_b = one.iteration_b;
