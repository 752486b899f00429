-- Concentration of the mismatch: share of the sum of k3 in the top 0.1%, 1% and 10% of tokens, one row per run.
-- Unit: shares; gini from 0 (all tokens equal) to 1 (all in one token).
-- Source: arXiv 2602.04879 (improbable tokens dominate); IcePop masks 1 to 2 tokens in a thousand.
-- Meaning: a share near 1 means that outliers cause the mismatch and are cheap to cut; a share near 0.001 means that it
--   is spread over all tokens.
SELECT run, count(*) AS num_tokens, sum(k3) FILTER (place <= ceil(0.001 * n)) / sum(k3) AS top_thousandth,
       sum(k3) FILTER (place <= ceil(0.01 * n)) / sum(k3) AS top_hundredth,
       sum(k3) FILTER (place <= ceil(0.1 * n)) / sum(k3) AS top_tenth,
       sum((n + 1 - 2 * place) * k3) / (any_value(n) * sum(k3)) AS gini
FROM (
    SELECT run, k3, row_number() OVER (PARTITION BY run ORDER BY k3 DESC) AS place, count(*) OVER (PARTITION BY run) AS n
    FROM (SELECT run, expm1_minus(d) AS k3 FROM pair('train', 'rollout') WHERE mask AND isfinite(d))
)
GROUP BY run
ORDER BY run;
