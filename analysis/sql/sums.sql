-- pair_tokens(...): the tokens that count, with d NULL where it is not finite. It reads no token ids.
CREATE OR REPLACE MACRO pair_tokens(a, b, of_run, first_step, last_step) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, logprob_b,
           isnan(logprob_a) OR isnan(logprob_b) AS is_nan,
           CASE WHEN isfinite(logprob_a) AND isfinite(logprob_b) THEN logprob_a - logprob_b END AS d
    FROM (
        SELECT run, step, seq_id, iteration_a, iteration_b,
               unnest(logprobs_a)::DOUBLE AS logprob_a,
               unnest(logprobs_b)::DOUBLE AS logprob_b,
               unnest(mask) AS mask
        FROM (
            SELECT s.run, s.step, s.seq_id,
                   scores_a.iteration AS iteration_a, scores_b.iteration AS iteration_b,
                   scores_a.logprobs AS logprobs_a, scores_b.logprobs AS logprobs_b,
                   coalesce(s.response_mask, list_resize([]::BOOLEAN[], s.num_response_tokens, true)) AS mask
            FROM sequences AS s
            JOIN scores AS scores_a ON scores_a.run = s.run AND scores_a.step = s.step AND scores_a.seq_id = s.seq_id
            JOIN scores AS scores_b ON scores_b.run = s.run AND scores_b.step = s.step AND scores_b.seq_id = s.seq_id
            WHERE scores_a."pass" = a AND scores_b."pass" = b
              AND (of_run IS NULL OR (s.run = of_run AND scores_a.run = of_run AND scores_b.run = of_run))
              AND (first_step IS NULL OR (s.step >= first_step AND scores_a.step >= first_step
                                          AND scores_b.step >= first_step))
              AND (last_step IS NULL OR (s.step <= last_step AND scores_a.step <= last_step
                                         AND scores_b.step <= last_step))
        )
    )
    WHERE mask AND logprob_a IS NOT NULL AND logprob_b IS NOT NULL;

-- pair_keys(a, b, of_run, first_step, last_step): which sequences have a row of both passes; it reads no list.
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

-- counted_sums(...): the same for the sequences that have a token to count.
CREATE OR REPLACE MACRO counted_sums(a, b, of_run, first_step, last_step) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b,
           count(d) AS num_tokens,
           count(*) FILTER (is_nan) AS num_nan,
           count(*) FILTER (d IS NULL AND NOT is_nan) AS num_inf,
           sum(d) AS sum_d,
           sum(abs(d)) AS sum_abs_d,
           sum(d * d) AS sum_d2,
           sum(k3) AS sum_k3,
           max(abs(d)) AS max_abs_d,
           sum(growth) AS sum_expm1_d,
           sum(growth * (growth + 2)) AS sum_expm1_2d,
           count(*) FILTER (d < ln(0.8) OR d > ln(1.25)) AS num_outside,
           sum(prob_diff) AS sum_prob_diff,
           max(prob_diff) AS max_prob_diff,
           sum(prob_a) AS sum_prob_a,
           sum(prob_b) AS sum_prob_b,
           sum(prob_a * prob_a) AS sum_prob_a2,
           sum(prob_b * prob_b) AS sum_prob_b2,
           sum(prob_a * prob_b) AS sum_prob_ab
    FROM (
        SELECT *, prob_b * abs(growth) AS prob_diff, prob_b + prob_b * growth AS prob_a
        FROM (
            SELECT *, d + k3 AS growth, exp(CASE WHEN d IS NOT NULL THEN logprob_b END) AS prob_b
            FROM (SELECT *, expm1_minus(d) AS k3 FROM pair_tokens(a, b, of_run, first_step, last_step))
        )
    )
    GROUP BY run, step, seq_id, iteration_a, iteration_b;

-- sums_of_tokens(a, b, of_run, first_step, last_step): the sums of sums/ computed from tokens; NULL asks for all runs,
-- or leaves an end of the range of steps open.
-- A token is in the sums when it counts in the loss and both passes have a finite logprob for it; NaN and infinities
-- are counted, and in no sum. |exp(a) - exp(b)| is exp(b) |exp(d) - 1|, which keeps its digits for small d.
CREATE OR REPLACE MACRO sums_of_tokens(a, b, of_run, first_step, last_step) AS TABLE
    SELECT run, step, seq_id, iteration_a, iteration_b, coalesce(num_tokens, 0) AS num_tokens,
           coalesce(num_nan, 0) AS num_nan, coalesce(num_inf, 0) AS num_inf,
           sum_d, sum_abs_d, sum_d2, sum_k3, max_abs_d, sum_expm1_d, sum_expm1_2d,
           coalesce(num_outside, 0) AS num_outside, sum_prob_diff, max_prob_diff, sum_prob_a, sum_prob_b,
           sum_prob_a2, sum_prob_b2, sum_prob_ab
    FROM pair_keys(a, b, of_run, first_step, last_step)
    LEFT JOIN counted_sums(a, b, of_run, first_step, last_step) USING (run, step, seq_id, iteration_a, iteration_b);
