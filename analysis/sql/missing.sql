-- missing_steps: the steps in which a pair's kept sums and the scores do not name the same rows, or that lack quantiles or a
-- histogram.
CREATE OR REPLACE TEMP TABLE keys AS
    SELECT run, step, seq_id, iteration_a, iteration_b FROM pair_keys({a}, {b}, NULL, NULL, NULL);

CREATE OR REPLACE TEMP TABLE kept_keys AS
    SELECT run, step, seq_id, iteration_a, iteration_b FROM sequence_sums WHERE pass_a = {a} AND pass_b = {b};

CREATE OR REPLACE TEMP TABLE missing_steps AS
    SELECT DISTINCT run, step
    FROM ((FROM keys EXCEPT FROM kept_keys) UNION ALL (FROM kept_keys EXCEPT FROM keys))
    UNION
    SELECT run, step FROM sequence_sums AS kept
    WHERE pass_a = {a} AND pass_b = {b} AND num_tokens > 0 AND NOT EXISTS (
        FROM step_quantiles AS cuts
        WHERE cuts.pass_a = {a} AND cuts.pass_b = {b} AND cuts.run = kept.run AND cuts.step = kept.step
    )
    UNION
    SELECT run, step FROM step_quantiles AS cuts
    WHERE pass_a = {a} AND pass_b = {b} AND NOT EXISTS (
        FROM step_histograms AS bins
        WHERE bins.pass_a = {a} AND bins.pass_b = {b} AND bins.run = cuts.run AND bins.step = cuts.step
    );

-- What is kept of the other steps stays right.
INSERT INTO computed_sequence_sums
    SELECT * FROM sequence_sums
    WHERE pass_a = {a} AND pass_b = {b} AND (run, step) NOT IN (SELECT (run, step) FROM missing_steps);

INSERT INTO computed_step_quantiles
    SELECT * FROM step_quantiles
    WHERE pass_a = {a} AND pass_b = {b} AND (run, step) NOT IN (SELECT (run, step) FROM missing_steps);

INSERT INTO computed_step_histograms
    SELECT * FROM step_histograms
    WHERE pass_a = {a} AND pass_b = {b} AND (run, step) NOT IN (SELECT (run, step) FROM missing_steps);

INSERT INTO computed_run_quantiles
    SELECT * FROM run_quantiles
    WHERE pass_a = {a} AND pass_b = {b} AND run NOT IN (SELECT run FROM missing_steps);
