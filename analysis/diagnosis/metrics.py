"""A trace's own figures, under the names and definitions of those that publish theirs."""

from __future__ import annotations

import numpy as np

from ..check.evidence import Evidence


def own_metrics(evidence: Evidence) -> dict[str, float]:
    """Name of a metric, as figures and alarms have it -> the trace's value over all tokens.

    With n tokens: means of d, |d|, d^2 and k3 = exp(d) - 1 - d in nats; shares; ess_token = (sum w)^2 / (n sum w^2) with
    w = exp(d). `mean_exp_abs_d`, NeMo-RL's token_mult_prob_error, does not follow from sums and is of the sampled tokens.
    """
    sums = evidence.sums
    n = sums.num_tokens
    if not n:
        return {}
    growth, growth2 = sums.mean("sum_expm1_d"), sums.mean("sum_expm1_2d")
    sampled = np.abs(evidence.sample.d[evidence.sample.compared])
    return {
        "k1": -sums.mean("sum_d"),
        "k3": sums.mean("sum_k3"),
        "mean_abs_d": sums.mean("sum_abs_d"),
        "rms_d": float(np.sqrt(sums.mean("sum_d2"))),
        "max_abs_d": float(sums.columns["max_abs_d"].max()),
        "share_outside": sums.mean("num_outside"),
        "prob_diff_mean": sums.mean("sum_prob_diff"),
        "chi2_token": growth2,
        "ess_token": (1 + growth) ** 2 / (1 + growth2) if np.isfinite(growth2) else 0.0,
        "mean_exp_abs_d": float(np.mean(np.exp(np.minimum(sampled, 700.0)))) if len(sampled) else float("nan"),
    }
