-- Bounds of arXiv 2512.23075 on |J - L|, the error of the surrogate objective, for returns in [0, 1].
--   T = longest response, tokens; eps = largest total variation of a state; delta = largest KL of a state, nats. If only the KL
--   is known, eps <= sqrt(delta / 2) by Pinsker.
CREATE OR REPLACE MACRO pinsker(kl) AS least(1, sqrt(kl / 2));

CREATE OR REPLACE MACRO bound_classical(longest, eps) AS 2 * longest * (longest - 1) * eps * eps;

-- 4 eps sum_t min(1, sqrt((t - 1) delta / 2)): drift of the states, from the KL of prefixes.
CREATE OR REPLACE MACRO bound_pinsker(longest, eps, delta) AS
    4 * eps * list_sum(list_transform(range(longest::BIGINT), lambda before: pinsker(before * delta)));

-- 4 T eps D, with D the total variation of whole sequences or Pinsker's bound on it.
CREATE OR REPLACE MACRO bound_mixed(longest, eps, tv_sequence) AS 4 * longest * eps * tv_sequence;

-- 4 eps sum_t min(1, (t - 1) eps).
CREATE OR REPLACE MACRO bound_coupling(longest, eps) AS
    4 * least(1, eps) * list_sum(list_transform(range(longest::BIGINT), lambda before: least(1, before * eps)));

-- 4 sum_t D_t min(1, (T - t) eps, sqrt((T - t) delta / 2)), with D_t the mean total variation at position t = 1, 2, ...
CREATE OR REPLACE MACRO bound_adaptive_term(longest, place, mean_tv, eps, delta) AS
    4 * mean_tv * least(1, (longest - place) * eps, sqrt((longest - place) * delta / 2));
