-- Share of sequences that four rejection rules keep, by response length, one row per power of two.
-- Unit: shares of the sequences; per_token_rejection is a share of tokens.
-- Source: arXiv 2512.23075: a bound on the worst token keeps about exp(-p T) of responses of T tokens; verl's presets;
--   tim-trace corrections has every rule.
-- Meaning: a rule that rejects most long responses leaves mainly short ones to train on, so response length drifts.
SELECT run, (2 ** floor(log2(num_tokens)))::BIGINT AS shortest, count(*) AS num_sequences,
       avg((max_k2 <= 0.05)::INTEGER) AS kept_by_max_k2_0_05,
       avg((mean_k3 <= 0.001)::INTEGER) AS kept_by_mean_k3_0_001,
       avg((mean_d BETWEEN -ln(1.001) AND -ln(0.999))::INTEGER) AS kept_by_geometric,
       avg((sum_d BETWEEN ln(0.5) AND ln(2))::INTEGER) AS kept_by_sequence_ratio,
       0 - ln(nullif(avg((max_k2 <= 0.05)::INTEGER), 0)) / avg(num_tokens) AS per_token_rejection
FROM pair_responses('train', 'rollout')
GROUP BY run, shortest
ORDER BY run, shortest;
