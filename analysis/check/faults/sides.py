"""The two passes seen from each side, and the counts that most sentences need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..features import sampled
from ..finding import Number
from ..pair_data import PairData, once
from ..sample import PassSample


@dataclass(frozen=True, slots=True)
class Side:
    """One pass, and the other one. d is `sign` * (`values` - `others`)."""

    key: str
    """`a` or `b`."""
    own: PassSample
    other: PassSample
    values: np.ndarray
    """[K] logprobs of the kept tokens."""
    others: np.ndarray
    sign: float
    sampled_mean: float
    """Mean of logprob + entropy (nats). Near 0 if the tokens were sampled from this pass. NaN without entropies."""
    sampled_score: float
    """The same in standard errors. 0 without entropies."""

    @property
    def names(self) -> dict[str, Number]:
        return {"side": self.own.name, "other": self.other.name}


@once
def sides(data: PairData) -> tuple[Side, Side]:
    a, b = data.sample.a, data.sample.b
    return (
        Side("a", a, b, data.a, data.b, 1.0, *sampled(data, "a")),
        Side("b", b, a, data.b, data.a, -1.0, *sampled(data, "b")),
    )


def counts(data: PairData, tokens: np.ndarray | None = None) -> dict[str, Number]:
    """Count the kept tokens and sequences, and those in `tokens` ([K] bool, default all)."""
    of_sequences = len(np.unique(data.seq))
    inside = data.num_kept if tokens is None else int(tokens.sum())
    rows = of_sequences if tokens is None else len(np.unique(data.seq[tokens]))
    return {"num_tokens": inside, "of_tokens": data.num_kept, "num_sequences": rows, "of_sequences": of_sequences}
