-- verl_rows(a, b): sequences that both passes scored, with what of them is compared; an empty mask counts every token.
CREATE OR REPLACE MACRO verl_rows(a, b) AS TABLE
    SELECT s.run, s.step, s.seq_id, scores_a.iteration AS iteration_a, scores_b.iteration AS iteration_b,
           scores_a.logprobs AS old, scores_b.logprobs AS rollout, coalesce(s.response_mask, []::BOOLEAN[]) AS mask
    FROM sequences AS s
    JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
    JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id
    WHERE scores_a."pass" = a AND scores_b."pass" = b
      AND scores_a.logprobs IS NOT NULL AND scores_b.logprobs IS NOT NULL;

-- verl_summed(a, b): the sums of each sequence.
CREATE OR REPLACE MACRO verl_summed(a, b) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, sums.*
    FROM (SELECT * EXCLUDE (old, rollout, mask), verl_sums(old, rollout, mask) AS sums FROM verl_rows(a, b));
