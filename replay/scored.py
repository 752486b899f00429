"""Scores for rows of a step under one arm."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from ..tracer.routing import Routing
from .batching import ForwardBatch
from .recorded import RecordedRow


@dataclass(slots=True, kw_only=True)
class Scored:
    """Scores for rows of a step under one arm."""

    rows: list[RecordedRow] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    """One array per row: the logprobs [T] of the response tokens, nats."""
    batches: list[ForwardBatch] = field(default_factory=list)
    """Forward passes in which the rows ran, in order; empty if the engine forms its own batches."""
    routing: list[Routing] = field(default_factory=list)
    """Experts selected for the tokens in each row; empty if the recorded pass has no routing, or routers were not
    observed."""
    kept: np.ndarray | None = None
    """Indices of `rows` among the rows of `batches`; None if they are the same."""

    def only(self, names: Container[str]) -> Scored:
        """Return only the scores for the sequences in `names`."""
        kept = np.array([place for place, row in enumerate(self.rows) if row.seq_id in names], np.int64)
        return Scored(
            rows=[self.rows[place] for place in kept],
            logprobs=[self.logprobs[place] for place in kept],
            batches=self.batches,
            routing=[self.routing[place] for place in kept] if self.routing else [],
            kept=kept if self.kept is None else self.kept[kept],
        )

    def extend(self, part: Scored) -> None:
        """Append the scores for other rows in the same step."""
        self.rows.extend(part.rows)
        self.logprobs.extend(part.logprobs)
        self.batches.extend(part.batches)
        self.routing.extend(part.routing)
