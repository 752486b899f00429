"""State kept between TRL hooks.

Shapes: B rows per process, T padded response width, F reward functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...schemas.documents import Contract
from ...schemas.layout import EVAL_SPLIT
from .. import environment
from ..batch import Batch
from ..dense import Distribution
from ..routing import Routing
from ..rows import Forward
from .engine_call import EngineCall
from .models import KeptWeights
from .session import Session


@dataclass(slots=True, kw_only=True)
class Scoring:
    logprobs: Any
    """[rows, T] tensor (nats)."""
    entropy: Any
    is_reference: bool
    rows_a_forward: int
    distribution: Distribution | None = None
    captured_rows: list[int] = field(default_factory=list)
    routing: Routing | None = None


@dataclass(frozen=True, slots=True)
class TrainRows:
    captured: np.ndarray
    """[rows] bool, True for rows with recorded distributions."""
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray

    def take(self, rows: np.ndarray) -> TrainRows:
        return TrainRows(self.captured[rows], self.prompt_lengths[rows], self.response_lengths[rows])


@dataclass(slots=True, kw_only=True)
class Generation:
    split: str
    step: int
    policy_version: int
    seq_ids: list[str]
    group_ids: list[str]
    captured: np.ndarray
    rows: TrainRows | None = None
    """Set once the responses have been generated."""
    last_tokens: list[int | None] = field(default_factory=list)
    """[B] last token of each response, or None for an empty response."""
    returned: Any = ()
    rewards_per_func: Any = None
    """[rows of all processes, F] tensor."""
    scorings: list[Scoring] = field(default_factory=list)
    engine_calls: list[EngineCall] = field(default_factory=list)
    server_logprobs: list[Any] = field(default_factory=list)
    """[B][T][1] logprobs (nats) requested from the server only for recording. None stands for NaN."""


@dataclass(slots=True, kw_only=True)
class Recorded:
    batch: Batch
    generated: TrainRows
    prompt_width: int
    response_width: int
    train_scored: np.ndarray
    masks_attention: bool
    """True if the trainer may mask out whole rows, which then have no logprobs."""

    def forward(self, rows: np.ndarray, rows_a_forward: int, first_id: int) -> Forward:
        place = np.arange(len(rows))
        forward = place // rows_a_forward
        return Forward(
            ids=first_id + forward,
            places=place % rows_a_forward,
            rows=np.bincount(forward, minlength=1)[forward],
            pad_left=self.prompt_width - self.generated.prompt_lengths[rows],
            pad_right=self.response_width - self.generated.response_lengths[rows],
        )


@dataclass(slots=True, kw_only=True)
class Loss:
    recorded: Recorded
    rows: np.ndarray
    """[rows] indices into the generation batch."""
    scored_mask: Any
    scorings: list[Scoring] = field(default_factory=list)


_KEPT_BATCHES = 4
_EVALUATED = -1


class TrainerState:
    def __init__(self, session: Session):
        self.generation: Generation | None = None
        self.loss: Loss | None = None
        self.recorded: dict[int, Recorded] = {}
        self._num_batches = 0
        self._generations: dict[str, tuple[int, int]] = {}
        self.num_forwards: dict[tuple[str, str], int] = {}
        """Number of forward passes recorded so far, by (split, pass)."""
        self.described = False
        self.weights = KeptWeights(session)
        self.told_step: int | None = None
        self.told: dict[str, Any] = {}
        self._contracts: dict[Any, Contract] = {}
        self._settings: Any = None

    def name_of_generation(self, split: str, step: int) -> str:
        """Name a generation batch after its step: `7` for the first batch in step 7, then `7.2`, `7.3`, ..."""
        before, count = self._generations.get(split, (-1, 0))
        self._generations[split] = (step, count + 1 if step == before else 1)
        return str(step) if step != before else f"{step}.{count + 1}"

    def keep(self, recorded: Recorded) -> int:
        if recorded.batch.split == EVAL_SPLIT:
            self.recorded[_EVALUATED] = recorded
            return _EVALUATED
        index = self._num_batches
        self._num_batches += 1
        self.recorded[index] = recorded
        self.recorded.pop(index - _KEPT_BATCHES, None)
        return index

    def next_forwards(self, split: str, pass_name: str, count: int) -> int:
        first = self.num_forwards.get((split, pass_name), 0)
        self.num_forwards[split, pass_name] = first + count
        return first

    def refresh_contracts(self) -> None:
        settings = environment.torch_settings()
        if settings != self._settings:
            self._settings, self._contracts = settings, {}

    def contract(self, key: str, read: Callable[[], Contract]) -> Contract:
        if key not in self._contracts:
            self._contracts[key] = read()
        return self._contracts[key]
