"""The one model in memory: that of the arm under way, with the weights of one version in it."""

from __future__ import annotations

from typing import Any

from ...tracer.weights.reader import Tensor
from .scorer import GradientScorer


class HeldModel:
    """Built when an arm needs another than the one before."""

    def __init__(self, weights: Any):
        self._weights = weights
        self._tensors: tuple[tuple[int, int | None], dict[str, Tensor]] | None = None
        self._model: Any = None
        self._shared: Any = None
        self._key: Any = None
        self._put: Any = None
        self._attached: list[GradientScorer] = []

    def ready(self, scorer: GradientScorer, version: int, attempt: int | None) -> None:
        """Put a version's weights under an arm's scorer."""
        if self._key != scorer.key:
            self.close()
            self._model, self._key = scorer.build(), scorer.key
        if scorer not in self._attached:
            self._shared = scorer.attach(self._model, self._shared)
            self._attached.append(scorer)
        if self._put != (version, attempt):
            scorer.put(self._model, self._load(version, attempt))
            self._put = version, attempt

    def close(self) -> None:
        """Let go of the model, so that the next fits into memory."""
        for scorer in self._attached:
            scorer.detach()
        self._model = self._shared = self._key = self._put = None
        self._attached = []

    def _load(self, version: int, attempt: int | None) -> dict[str, Tensor]:
        if self._tensors is None or self._tensors[0] != (version, attempt):
            self._tensors = None
            self._tensors = (version, attempt), self._weights.load(version, attempt)
        return self._tensors[1]
