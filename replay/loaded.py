"""The one model in memory, with the weights of one version in it."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

from .meter import Told
from .recorded import RecordedRow
from .scored import Scored
from .scorers import Scorer


class LoadedModel:
    """A model that arms of the same load key share; built when it is first needed."""

    def __init__(self, weights: Any):
        self.weights = weights
        """What gives a version's tensors: `.load(version, attempt, is_lazy=True)`."""
        self._model: Any = None
        self._shared: Any = None
        self._version: tuple[int, int | None] | None = None
        self._attached: list[Scorer] = []
        self.load_s = 0.0
        """Seconds that the last version's weights took; 0 where an engine started with them."""

    def score(self, scorer: Scorer, rows: list[RecordedRow], told: Told) -> Scored:
        """Score each row with its own version's weights, or all with the arm's.

        `told` gets the shares that are done, and 0 where weights are loaded and scoring starts.
        """
        if self._model is None:
            self._model = scorer.build()
        if scorer not in self._attached:
            self._shared = scorer.attach(self._model, self._shared)
            self._attached.append(scorer)
        whole = Scored()
        for version in sorted({row.policy_version for row in rows}):
            stale = scorer.arm.weights_version
            self._put(scorer, version if stale is None else stale, rows[0].attempt)
            told(0.0)
            chosen = [row for row in rows if row.policy_version == version]
            whole.extend(scorer.score(chosen, partial(_share_of, told, len(chosen) / len(rows))))
        return whole

    def close(self) -> None:
        """Let go of the model, so that the next fits into memory."""
        for scorer in self._attached:
            scorer.detach()
        if hasattr(self._model, "close"):
            self._model.close()
        self._model = self._shared = None

    def _put(self, scorer: Scorer, version: int, attempt: int | None) -> None:
        if (version, attempt) != self._version:
            start, is_start = perf_counter(), self._version is None and scorer.starts_with_weights
            scorer.put(self._model, self.weights.load(version, attempt, is_lazy=True))
            self._version = version, attempt
            self.load_s = 0.0 if is_start else perf_counter() - start


def _share_of(told: Told, part: float, share: float) -> None:
    told(part * share)
