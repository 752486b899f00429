"""What an arm gave the rows of a step."""

from __future__ import annotations

from collections.abc import Container
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
    kept: np.ndarray | None = None
    """Places of `rows` among those of `batches`; None where they are the same."""

    def only(self, names: Container[str]) -> Scored:
        """The same of the sequences of these names."""
        kept = np.array([place for place, row in enumerate(self.rows) if row.seq_id in names], np.int64)
        return Scored(
            rows=[self.rows[place] for place in kept],
            logprobs=[self.logprobs[place] for place in kept],
            batches=self.batches,
            distributions={name: value for name, value in self.distributions.items() if name in names},
            routing=[self.routing[place] for place in kept] if self.routing else [],
            kept=kept if self.kept is None else self.kept[kept],
        )

    def extend(self, part: Scored) -> None:
        """Take in what other rows of the step were given."""
        self.rows.extend(part.rows)
        self.logprobs.extend(part.logprobs)
        self.batches.extend(part.batches)
        self.distributions.update(part.distributions)
        self.routing.extend(part.routing)
