"""Values above 0, which are not logprobs."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Fault
from ..hypothesis import Hypothesis
from ..pair_data import PairData

MAX_LOGPROB = 1e-4
"""Largest value accepted as a logprob, nats: rounding in a float32 softmax can give logprobs up to 1e-6 above 0."""

NOT_LOGPROBS = Fault(
    code="not_logprobs",
    title="values are not logprobs: some are above 0",
    broken="recording",
    evidence={
        "above_zero": "{side} has values above 0 for {num_tokens:,} tokens, from {least:.3g} to {largest:.3g}: a "
        "logprob is at most 0, and no known unit makes these agree with the other side"
    },
)


def find_positive(data: PairData) -> list[Hypothesis]:
    """Detect values above 0 in either pass."""
    found = []
    for side, name in (("a", "logprob_a"), ("b", "logprob_b")):
        own = getattr(data.sample, side)
        where = data.keep & (np.nan_to_num(own.logprobs, nan=-1.0) > MAX_LOGPROB)
        if where.any():
            values = own.logprobs[where]
            query = f"SELECT step, seq_id, position, token_id, logprob_a, logprob_b FROM {{pair}} WHERE mask AND {name} > {MAX_LOGPROB} LIMIT 20"
            finding = NOT_LOGPROBS.finding(
                data, "above_zero", where[data.keep], next=commands.sql(data, query),
                numbers={
                    "side": own.name, "num_tokens": int(where.sum()), "least": float(values.min()), "largest": float(values.max()),
                },
            )  # fmt: skip
            found.append(Hypothesis(finding=finding, tokens=where, gain=float("inf")))
    return found
