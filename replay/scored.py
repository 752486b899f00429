"""What an arm gave the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..tracer.dense import Distribution
from ..tracer.routing import Routing
from .batching import ForwardBatch
from .recorded import RecordedRow


@dataclass(slots=True, kw_only=True)
class Scored:
    """What an arm gave the rows of a step."""

    rows: list[RecordedRow] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    """[T] of each row, nats."""
    batches: list[ForwardBatch] = field(default_factory=list)
    """The forwards that the rows went through, in their order; empty where an engine batches by itself."""
    distributions: dict[str, Distribution] = field(default_factory=dict)
    """Each captured row's, by the sequence's name."""
    routing: list[Routing] = field(default_factory=list)
    """What each row's tokens were routed to; empty where the recorded pass has no routing, or nobody listened."""

    def extend(self, part: Scored) -> None:
        """Take in what other rows of the step were given."""
        self.rows.extend(part.rows)
        self.logprobs.extend(part.logprobs)
        self.batches.extend(part.batches)
        self.distributions.update(part.distributions)
        self.routing.extend(part.routing)
