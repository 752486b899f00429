"""A trace's own figures, under the names and definitions of those that publish theirs."""

from __future__ import annotations

import numpy as np

from ..check.pair_data import PairData
from ..statistics.estimators import FROM_SUMS, addable

_FROM_SUMS = ("k1", "k3", "mean_abs_d", "rms_d", "share_outside", "prob_diff_mean", "chi2_token", "ess_token")


def own_metrics(data: PairData) -> dict[str, float]:
    """Name of a metric, as figures and alarms have it -> the trace's value over all tokens.

    With n tokens: means of d, |d|, d^2 and k3 = exp(d) - 1 - d in nats; shares; ess_token = (sum w)^2 / (n sum w^2) with
    w = exp(d). `mean_exp_abs_d`, NeMo-RL's token_mult_prob_error, does not follow from sums and is of the sampled tokens.
    """
    sums = data.sums
    if not sums.num_tokens:
        return {}
    there = sums.columns["num_tokens"] > 0
    columns = addable({name: values[there].astype(np.float64) for name, values in sums.columns.items()})
    totals = {name: np.asarray(values.sum(), np.float64) for name, values in columns.items()}
    found = {name: float(FROM_SUMS[name](totals)) for name in _FROM_SUMS}
    sampled = np.abs(data.sample.d[data.sample.compared])
    return found | {
        "max_abs_d": float(sums.columns["max_abs_d"].max()),
        "mean_exp_abs_d": float(np.mean(np.exp(np.minimum(sampled, 700.0)))) if len(sampled) else float("nan"),
    }
