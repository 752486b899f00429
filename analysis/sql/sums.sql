-- pair_tokens(a, b): the tokens that count; d is NULL if it is not finite. Token ids are not read.
CREATE OR REPLACE MACRO pair_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprob_b,
           CASE WHEN isfinite(logprob_a) AND isfinite(logprob_b) THEN logprob_a - logprob_b END AS d
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, unnest(logprobs_a)::DOUBLE AS logprob_a,
               unnest(logprobs_b)::DOUBLE AS logprob_b, unnest(token_mask(response_mask, num_response_tokens)) AS mask
        FROM scored_by_both(a, b)
    )
    WHERE mask AND logprob_a IS NOT NULL AND logprob_b IS NOT NULL;

-- pair_keys(a, b, of_run, first_step, last_step): sequences with a row in both passes, without reading lists.
CREATE OR REPLACE MACRO pair_keys(a, b, of_run, first_step, last_step) AS TABLE
    SELECT scores_a.run, scores_a.step, scores_a.seq_id,
           scores_a.iteration AS iteration_a, scores_b.iteration AS iteration_b
    FROM scores AS scores_a
    JOIN scores AS scores_b ON scores_b.run = scores_a.run AND scores_b.step = scores_a.step
                           AND scores_b.seq_id = scores_a.seq_id
    WHERE scores_a."pass" = a AND scores_b."pass" = b
      AND (of_run IS NULL OR (scores_a.run = of_run AND scores_b.run = of_run))
      AND (first_step IS NULL OR (scores_a.step >= first_step AND scores_b.step >= first_step))
      AND (last_step IS NULL OR (scores_a.step <= last_step AND scores_b.step <= last_step));

-- pair_lists(a, b, of_runs, first_step, last_step): logprob lists of the rows in both passes (empty if missing or without a
-- sequence), the mask (empty if every token counts) and the advantages (empty if recorded per sequence). A NULL argument selects
-- all runs, or leaves an end of the range open.
CREATE OR REPLACE MACRO pair_lists(a, b, of_runs, first_step, last_step) AS TABLE
    SELECT scores_a.run, scores_a.step, scores_a.seq_id,
           scores_a.iteration AS iteration_a, scores_b.iteration AS iteration_b,
           coalesce(CASE WHEN s.seq_id IS NOT NULL THEN scores_a.logprobs END, []::FLOAT[]) AS logprobs_a,
           coalesce(scores_b.logprobs, []::FLOAT[]) AS logprobs_b,
           coalesce(s.response_mask, []::BOOLEAN[]) AS mask, s.advantage::DOUBLE AS advantage,
           coalesce(s.advantages, []::FLOAT[]) AS advantages
    FROM scores AS scores_a
    JOIN scores AS scores_b ON scores_b.run = scores_a.run AND scores_b.step = scores_a.step
                           AND scores_b.seq_id = scores_a.seq_id
    LEFT JOIN sequences AS s ON s.run = scores_a.run AND s.step = scores_a.step AND s.seq_id = scores_a.seq_id
    WHERE scores_a."pass" = a AND scores_b."pass" = b
      AND (of_runs IS NULL OR (list_contains(of_runs, scores_a.run) AND list_contains(of_runs, scores_b.run)))
      AND (first_step IS NULL OR (scores_a.step >= first_step AND scores_b.step >= first_step))
      AND (last_step IS NULL OR (scores_a.step <= last_step AND scores_b.step <= last_step));

-- sums_of_tokens(a, b): the stored sums, computed from tokens. A token is summed if it counts toward the loss and is finite
-- in both passes; NaN and infinities are only counted.
CREATE OR REPLACE MACRO sums_of_tokens(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, sums.*
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b, pair_sums_of(logprobs_a, logprobs_b, mask) AS sums
        FROM pair_lists(a, b, NULL, NULL, NULL)
    );
