-- prime-rl 0.8.0's metrics: default_loss_fn and ipo_loss_fn of src/prime_rl/trainer/rl/loss.py, train.py, and the
-- statistics of Tensors.compute_stats. Pass a is the trainer, pass b the inference; d = a - b, over unmasked tokens.
--   mismatch_kl/all: statistics of exp(d) - 1 - d over tokens. All other metrics are statistics over sequences, of each
--   sequence's mean over tokens (0 without tokens).
--   A token is masked by the loss if its advantage is positive and its probability rose by more than dppo_mask_high, or if its
--   advantage is not positive and its probability dropped by more than dppo_mask_low; with ipo_threshold, if its probability
--   changed by more than that.
--   masked_mismatch_kl and unmasked_mismatch_kl are over the tokens that are, or are not, masked by the loss. is_masked_low and
--   is_masked_high are shares of all tokens that are masked with a negative or positive advantage; masked_advantage_* are the
--   shares of both signs among masked tokens.
--   entropy/all: statistics of the trainer's entropy over tokens. kl_ent_ratio/mean = mean of mismatch_kl/all divided by the
--   mean of entropy/all, if the latter is above 0. NULL if the trainer has no entropy for some token.
--   median is the lower of the two middle values; std divides by n - 1.

-- prime_rl_tokens(...): one row per unmasked token, with the trainer's entropy.
CREATE OR REPLACE MACRO prime_rl_tokens(a, b, dppo_mask_low, dppo_mask_high, ipo_threshold) AS TABLE
    SELECT *, mask_low AND advantage < 0 AS masked_low, mask_high AND advantage > 0 AS masked_high,
           CASE WHEN ipo_threshold IS NOT NULL THEN above(abs(change), ipo_threshold)
                WHEN advantage > 0 THEN mask_high
                WHEN advantage <= 0 THEN mask_low END AS masked
    FROM (
        SELECT *, above(change, dppo_mask_high) AS mask_high, below(change, -dppo_mask_low) AS mask_low
        FROM (
            SELECT run, step, seq_id, iteration_a, iteration_b, advantage, entropy,
                   expm1_minus(logprob_a - logprob_b) AS mismatch_kl, exp(logprob_a) - exp(logprob_b) AS change
            FROM (
                SELECT run, step, seq_id, iteration_a, iteration_b,
                       unnest(token_mask(response_mask, num_response_tokens)) AS mask,
                       unnest(token_advantages(advantages, advantage, num_response_tokens)) AS advantage,
                       unnest(entropy_a)::DOUBLE AS entropy, unnest(logprobs_a)::DOUBLE AS logprob_a,
                       unnest(logprobs_b)::DOUBLE AS logprob_b
                FROM scored_by_both(a, b)
            )
            WHERE mask AND logprob_a IS NOT NULL AND logprob_b IS NOT NULL
        )
    );

CREATE OR REPLACE MACRO prime_rl_stats(x) AS
    {'mean': avg(x), 'median': torch_median(x), 'std': torch_std(x), 'min': torch_min(x), 'max': torch_max(x)};

-- prime_rl_stats over all tokens, without the median, from each sequence's count, mean, centred squares, minimum and maximum.
CREATE OR REPLACE MACRO prime_rl_merged(num, mean, off, spread, smallest, largest) AS
    {'mean': sum(num * mean) / sum(num),
     'std': CASE WHEN bool_and(isfinite(mean)) AND sum(num) > 1
                 THEN sqrt(floored((sum(spread + num * off * off) - sum(num * off) ** 2 / sum(num)) / (sum(num) - 1)))
                 ELSE 'NaN'::DOUBLE END,
     'min': torch_min(smallest), 'max': torch_max(largest)};

CREATE OR REPLACE MACRO prime_rl_known(num_unknown, x) AS CASE WHEN num_unknown > 0 THEN NULL ELSE coalesce(x, 0.0) END;

-- prime_rl_rows(...): per-sequence means; NULL if tokens lack the advantage that decides their mask.
CREATE OR REPLACE MACRO prime_rl_rows(a, b, dppo_mask_low, dppo_mask_high, ipo_threshold) AS TABLE
    SELECT run, step, seq_id, coalesce(num_tokens, 0) AS num_tokens, mean_kl, spread_kl, min_kl, max_kl,
           coalesce(num_entropies, 0) AS num_entropies, mean_entropy, spread_entropy, min_entropy, max_entropy,
           prime_rl_known(num_unknown, masked_mismatch_kl) AS masked_mismatch_kl,
           prime_rl_known(num_unknown, unmasked_mismatch_kl) AS unmasked_mismatch_kl,
           prime_rl_known(num_unknown, num_masked / num_tokens) AS is_masked,
           prime_rl_known(num_unknown, num_low / num_tokens) AS is_masked_low,
           prime_rl_known(num_unknown, num_high / num_tokens) AS is_masked_high,
           prime_rl_known(num_unknown, num_positive / greatest(num_masked, 1)) AS masked_advantage_positive,
           prime_rl_known(num_unknown, num_negative / greatest(num_masked, 1)) AS masked_advantage_negative
    FROM pair_keys(a, b, NULL, NULL, NULL)
    LEFT JOIN (
        SELECT run, step, seq_id, iteration_a, iteration_b, count(*) AS num_tokens,
               avg(mismatch_kl) AS mean_kl, torch_squares(mismatch_kl) AS spread_kl,
               torch_min(mismatch_kl) AS min_kl, torch_max(mismatch_kl) AS max_kl,
               count(entropy) AS num_entropies, avg(entropy) AS mean_entropy, torch_squares(entropy) AS spread_entropy,
               torch_min(entropy) AS min_entropy, torch_max(entropy) AS max_entropy,
               count(*) FILTER (masked IS NULL) AS num_unknown,
               avg(mismatch_kl) FILTER (masked) AS masked_mismatch_kl,
               avg(mismatch_kl) FILTER (NOT masked) AS unmasked_mismatch_kl,
               count(*) FILTER (masked) AS num_masked,
               count(*) FILTER (masked_low) AS num_low, count(*) FILTER (masked_high) AS num_high,
               count(*) FILTER (masked AND advantage > 0) AS num_positive,
               count(*) FILTER (masked AND advantage < 0) AS num_negative
        FROM prime_rl_tokens(a, b, dppo_mask_low, dppo_mask_high, ipo_threshold)
        GROUP BY ALL
    ) USING (run, step, seq_id, iteration_a, iteration_b);

-- prime_rl_from_rows(...): all metrics, but NULL for the medians over tokens.
CREATE OR REPLACE MACRO prime_rl_from_rows(a, b, by_step, dppo_mask_low, dppo_mask_high, ipo_threshold) AS TABLE
    SELECT run, step, kl.mean AS "mismatch_kl/all/mean", NULL::DOUBLE AS "mismatch_kl/all/median",
           kl.std AS "mismatch_kl/all/std", kl.min AS "mismatch_kl/all/min", kl.max AS "mismatch_kl/all/max",
           {columns}, entropy.mean AS "entropy/all/mean", NULL::DOUBLE AS "entropy/all/median",
           entropy.std AS "entropy/all/std", entropy.min AS "entropy/all/min", entropy.max AS "entropy/all/max",
           CASE WHEN above(entropy.mean, 0) THEN kl.mean / entropy.mean END AS "kl_ent_ratio/mean"
    FROM (
        SELECT run, step,
               prime_rl_merged(num_tokens, mean_kl, off_kl, spread_kl, min_kl, max_kl) AS kl,
               CASE WHEN sum(num_entropies) = sum(num_tokens)
                    THEN prime_rl_merged(num_tokens, mean_entropy, off_entropy, spread_entropy, min_entropy, max_entropy)
                    END AS entropy,
               prime_rl_stats(masked_mismatch_kl) AS masked_mismatch_kl,
               prime_rl_stats(unmasked_mismatch_kl) AS unmasked_mismatch_kl,
               prime_rl_stats(is_masked) AS is_masked, prime_rl_stats(is_masked_low) AS is_masked_low,
               prime_rl_stats(is_masked_high) AS is_masked_high,
               prime_rl_stats(masked_advantage_positive) AS masked_advantage_positive,
               prime_rl_stats(masked_advantage_negative) AS masked_advantage_negative
        FROM (
            -- Means are taken relative to a nearby centre, to avoid cancellation in the squares.
            SELECT *, mean_kl - median(mean_kl) OVER grouped AS off_kl,
                   mean_entropy - median(mean_entropy) OVER grouped AS off_entropy
            FROM (
                SELECT * REPLACE (CASE WHEN by_step THEN step END AS step)
                FROM prime_rl_rows(a, b, dppo_mask_low, dppo_mask_high, ipo_threshold)
            )
            WINDOW grouped AS (PARTITION BY run, step)
        )
        GROUP BY run, step
        HAVING sum(num_tokens) > 0
    );

CREATE OR REPLACE MACRO prime_rl_numbers(a, b, by_step, dppo_mask_low, dppo_mask_high, ipo_threshold) AS TABLE
    SELECT found.* REPLACE (
        median_kl AS "mismatch_kl/all/median",
        CASE WHEN "entropy/all/mean" IS NOT NULL THEN median_entropy END AS "entropy/all/median"
    )
    FROM prime_rl_from_rows(a, b, by_step, dppo_mask_low, dppo_mask_high, ipo_threshold) AS found
    JOIN (
        SELECT run, CASE WHEN by_step THEN step END AS step, torch_median(mismatch_kl) AS median_kl,
               torch_median(entropy) AS median_entropy
        FROM prime_rl_tokens(a, b, dppo_mask_low, dppo_mask_high, ipo_threshold)
        GROUP BY ALL
    ) AS medians ON medians.run = found.run AND medians.step IS NOT DISTINCT FROM found.step
    ORDER BY found.run, found.step;
