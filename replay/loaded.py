from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from ..schemas.documents import Contract
from ..schemas.errors import InvalidOption, option
from ..tracer.progress import Advance
from ..tracer.weights.checkpoints import CheckpointReader
from ..tracer.weights.reader import WeightReader
from .arm_option import EXACT, HF, VLLM
from .arms import Arm
from .backends.exact.scorer import ExactArmScorer
from .batching import Scored
from .hf_scorer import HfScorer
from .recorded import RecordedRow, RecordedRun
from .vllm_scorer import VllmScorer

Scorer = HfScorer | VllmScorer


def scorer_of(run: RecordedRun, arm: Arm, contract: Contract, device: str) -> Scorer:
    kinds: dict[str, type[Scorer]] = {HF: HfScorer, VLLM: VllmScorer, EXACT: ExactArmScorer}
    return kinds[arm.engine](run, arm, contract, device)


class LoadedModel:
    """Builds the model and loads its weights. Scorers with the same `key` share the model. A new key rebuilds it."""

    def __init__(self, weights: WeightReader | CheckpointReader):
        self._weights = weights
        self._model: Any = None
        self._shared: Any = None
        self._key: Any = None
        self._version: tuple[int, int | None] | None = None
        self._attached: list[Scorer] = []
        self.load_s = 0.0
        """Time to load the most recent weights (seconds). 0 if the engine was started with these weights."""

    def score(self, scorer: Scorer, rows: list[RecordedRow], advance: Advance) -> Scored:
        """Score each row with its own policy version's weights, unless the arm overrides the version."""
        whole = Scored()
        for version in sorted({row.policy_version for row in rows}):
            stale = scorer.arm.weights_version
            self.ready(scorer, version if stale is None else stale, rows[0].attempt)
            whole.extend(scorer.score([row for row in rows if row.policy_version == version], advance))
        return whole

    def ready(self, scorer: Scorer, version: int, attempt: int | None) -> None:
        if self._key != (key := scorer.key):
            self.close()
            self._model, self._key = scorer.build(), key
        if scorer not in self._attached:
            self._shared = scorer.attach(self._model, self._shared)
            self._attached.append(scorer)
        if (version, attempt) != self._version:
            start, is_start = perf_counter(), self._version is None and scorer.arm.engine == VLLM
            scorer.put(self._model, self._weights.load(version, attempt, is_lazy=True))
            self._version = version, attempt
            self.load_s = 0.0 if is_start else perf_counter() - start

    def close(self) -> None:
        for scorer in self._attached:
            scorer.detach()
        if hasattr(self._model, "close"):
            self._model.close()
        self._model = self._shared = self._key = self._version = None
        self._attached = []


def device_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus_of_actor(ray: str | None, gpus_per_arm: float | None) -> float:
    if ray is None:
        if gpus_per_arm is not None:
            raise InvalidOption(f"applies only to a cluster; add {option('ray', 'auto')}", option="gpus_per_arm")
        return 0.0
    if gpus_per_arm is None:
        return 1.0 if device_here() == "cuda" else 0.0
    if gpus_per_arm < 0 or (gpus_per_arm > 1 and gpus_per_arm != int(gpus_per_arm)):
        raise InvalidOption(
            f"got {gpus_per_arm:g}; pass a fraction from 0 to 1, or a whole number", option="gpus_per_arm"
        )
    return float(gpus_per_arm)
