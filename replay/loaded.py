"""The model in memory, with the weights of one version, and the scorers attached to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from ..schemas.capture import Capture
from ..schemas.contract import Contract
from ..tracer.weights.checkpoints import CheckpointReader
from ..tracer.weights.reader import Tensor, WeightReader
from .arms import Arm
from .exact_scorer import ExactArmScorer
from .hf_scorer import HfScorer
from .meter import Told
from .recorded import RecordedRow, RecordedRun
from .scored import Scored
from .vllm_scorer import VllmScorer

Scorer = HfScorer | VllmScorer
"""Scorer of an arm: builds a model, loads weights, is attached to the model, and scores rows."""
_OF_ENGINE: dict[str, type[HfScorer] | type[VllmScorer]] = {
    "hf": HfScorer, "vllm": VllmScorer, "exact": ExactArmScorer,
}  # fmt: skip
Rows = dict[int, list[RecordedRow]]
"""Step -> rows in the step."""
FORWARDS = 16
"""Maximum number of forward passes in steps that are scored together. It bounds the memory used, and the work that is
lost if a replay is killed."""


def scorer_of(run: RecordedRun, arm: Arm, contract: Contract, device: str, capture: Capture) -> Scorer:
    """Return the scorer of an arm. Raises CannotReplay if this machine cannot run it."""
    return _OF_ENGINE[arm.engine](run, arm, contract, device, capture)


class LoadedModel:
    """A model shared by arms with equal load keys. It is rebuilt when a scorer needs a different model."""

    def __init__(self, weights: WeightReader | CheckpointReader, *, keeps_tensors: bool = False):
        """Start without a model. `keeps_tensors` keeps a version's tensors in memory, for several models that need them
        in turn."""
        self._weights, self._keeps_tensors = weights, keeps_tensors
        self._tensors: tuple[Any, dict[str, Tensor]] | None = None
        self._model: Any = None
        self._shared: Any = None
        self._key: Any = None
        self._version: tuple[int, int | None] | None = None
        self._attached: list[Scorer] = []
        self.load_s = 0.0
        """Seconds that loading the most recent version's weights took; 0 if an engine was started with these
        weights."""

    def score(self, scorer: Scorer, rows: list[RecordedRow], told: Told) -> Scored:
        """Return the scores of rows, each with the weights of its policy version, or all with the version that the arm
        sets.

        `told` is called with each completed share of the work, and with 0 when weights are loaded and scoring starts.
        """
        whole = Scored()
        for version in sorted({row.policy_version for row in rows}):
            stale = scorer.arm.weights_version
            self.ready(scorer, version if stale is None else stale, rows[0].attempt)
            told(0.0)
            chosen = [row for row in rows if row.policy_version == version]
            whole.extend(scorer.score(chosen, partial(_share_of, told, len(chosen) / len(rows))))
        return whole

    def ready(self, scorer: Scorer, version: int, attempt: int | None) -> None:
        """Load the model and weights that a scorer needs, unless they are loaded."""
        if self._key != (key := scorer.key):
            self.close()
            self._model, self._key = scorer.build(), key
        if scorer not in self._attached:
            self._shared = scorer.attach(self._model, self._shared)
            self._attached.append(scorer)
        if (version, attempt) != self._version:
            start, is_start = perf_counter(), self._version is None and scorer.starts_with_weights
            scorer.put(self._model, self._read(version, attempt))
            self._version = version, attempt
            self.load_s = 0.0 if is_start else perf_counter() - start

    def close(self) -> None:
        """Release the model, so that the next model fits into memory."""
        for scorer in self._attached:
            scorer.detach()
        if hasattr(self._model, "close"):
            self._model.close()
        self._model = self._shared = self._key = self._version = None
        self._attached = []

    def _read(self, version: int, attempt: int | None) -> dict[str, Tensor]:
        if not self._keeps_tensors:
            return self._weights.load(version, attempt, is_lazy=True)
        if self._tensors is None or self._tensors[0] != (version, attempt):
            self._tensors = None
            self._tensors = (version, attempt), self._weights.load(version, attempt)
        return self._tensors[1]


def _share_of(told: Told, part: float, share: float) -> None:
    told(part * share)


def joined_steps(
    steps: Iterable[tuple[int, list[RecordedRow]]], most: int, num_tokens: Callable[[int, list[RecordedRow]], int]
) -> Iterator[Rows]:
    """Yield groups of steps that are scored together, up to `most` tokens per group. If `most` is 0, a group is one
    step.

    Steps are joined if all rows have the same policy version and attempt, and no two steps share a sequence name.
    """
    joined: Rows = {}
    tokens, names, key = 0, set[str](), None
    for step, rows in steps:
        found, own = {(row.policy_version, row.attempt) for row in rows}, {row.seq_id for row in rows}
        if joined and (tokens >= most or len(found) > 1 or found != key or not names.isdisjoint(own)):
            yield joined
            joined, tokens, names = {}, 0, set()
        joined[step], key = rows, found
        tokens, names = tokens + num_tokens(step, rows), names | own
    if joined:
        yield joined


class JoinedScoring:
    """Scoring of a group of steps: each step when it is requested, or all steps at the first request."""

    def __init__(self, loaded: LoadedModel, steps: Sequence[int]):
        self._loaded, self._steps = loaded, steps
        self._scored: dict[tuple[str, int], Scored] = {}

    def score(
        self,
        scorer: Scorer,
        step: int,
        rows: list[RecordedRow],
        of_step: Callable[[int], list[RecordedRow]],
        told: Callable[[int], Told],
    ) -> Scored:
        """Return an arm's scores for rows in a step.

        `of_step` returns the rows of a later step that will be requested; `told(num_tokens)` returns the progress
        callback.
        """
        name = scorer.arm.name
        if (name, step) in self._scored:
            return self._scored.pop((name, step))
        parts = {step: rows}
        if scorer.arm.batch_tokens is not None and not scorer.capture.dense:
            parts |= {later: of_step(later) for later in self._steps if later > step}
        together = [row for part in parts.values() for row in part]
        whole = self._loaded.score(scorer, together, told(sum(row.num_tokens for row in together)))
        if len(together) == len(rows):
            return whole
        self._scored |= {(name, number): whole.only({row.seq_id for row in part}) for number, part in parts.items()}
        return self._scored.pop((name, step))
