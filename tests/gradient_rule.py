"""Which terms of a loss have a gradient."""

import numpy as np
from tim_trace.analysis.statistics.loss import is_clipped
from tim_trace.schemas.loss import PPO


def has_gradient(loss, ratio, advantage):
    """Return bool: a clipped term has no gradient under ppo_clip; under cispo, its weight is the bound."""
    known = np.asarray(advantage != 0)
    return known & ~is_clipped(loss, ratio, advantage) if loss.kind == PPO else known
