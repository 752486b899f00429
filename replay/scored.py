"""What an arm gave the rows of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..tracer.routing import Routing
from .batching import ForwardBatch
from .recorded import RecordedRow


class Scored(NamedTuple):
    """What an arm gave the rows of a step."""

    rows: list[RecordedRow]
    logprobs: list[np.ndarray]
    """[T] of each row, nats."""
    batches: list[ForwardBatch]
    """The forwards that the rows went through, in their order; empty where an engine batches by itself."""
    routing: list[Routing]
    """What each row's tokens were routed to; empty where the recorded pass has no routing, or nobody listened."""
