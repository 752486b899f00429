"""Shapes: B rows in a forward pass (1 if packed), W row length including padding, N scored tokens, H hidden width."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ....schemas.documents import Contract
from ....schemas.errors import CannotReplay, option
from ....tracer.weights.reader import Tensor
from ...arms import Arm
from ...batching import ForwardBatch, PackedBatch, cached_ends
from ...hf_scorer import HfScorer, LoadKey
from ...recorded import RecordedRun
from .. import model as models
from ..head import BatchScorer
from .model import ExactModel, check


class ExactScorer(BatchScorer):
    """Computes logprobs whose bits do not depend on batch, padding, chunking or thread count."""

    name = "tim_trace.replay.backends.exact.scorer.ExactScorer"

    def __init__(
        self, model: ExactModel, *, temperature: float = 1.0, head_dtype: Any = None, cached_tokens: int | None = None
    ):
        self._model, self._temperature, self._head_dtype = model, temperature, head_dtype
        self._cached_tokens = cached_tokens

    def logprobs(self, batch: ForwardBatch) -> Any:
        ids_BW, positions_BW, rows_BW = (torch.from_numpy(part).to(self._model.device) for part in laid(batch))
        caches = self._model.caches(*ids_BW.shape)
        parts = [
            self._model.hidden(ids_BW[:, start:end], positions_BW[:, :end], rows_BW[:, :end], caches)
            for start, end in pairwise(cached_ends(batch, self._cached_tokens))
        ]
        scored_N = torch.from_numpy(batch.scored_N).to(self._model.device)
        head = self._model.head(self._temperature, self._head_dtype)
        # Subtract 1, because each token is predicted from the preceding token's hidden state.
        return head.logprobs(torch.cat(parts, dim=1).flatten(0, 1)[scored_N - 1], ids_BW.flatten()[scored_N])


def laid(batch: ForwardBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the token ids, their positions within the row, and their row numbers (0 for padding), each [B, W]."""
    if isinstance(batch, PackedBatch):
        rows_W = np.repeat(np.arange(len(batch.rows)) + 1, [row.num_tokens for row in batch.rows])
        return batch.ids_BW, batch.positions_W[None], rows_W[None]
    return batch.ids_BW, np.maximum(batch.mask_BW.cumsum(axis=1) - 1, 0), batch.mask_BW


class ExactArmScorer(HfScorer):
    def __init__(self, run: RecordedRun, arm: Arm, contract: Contract, device: str):
        super().__init__(run, arm, contract, device)
        if run.model_factory is not None:
            raise CannotReplay(
                "engine exact uses its own layers, so it cannot run a model built by a factory; use "
                f"{option('engine', 'hf')}"
            )
        check(run.model)
        autocast = self.numerics.autocast
        if autocast is not None:
            raise CannotReplay(
                f"engine exact: the recorded pass used autocast to {autocast} over {self.numerics.dtype} weights, "
                f"but this engine computes in one dtype; add {option('dtype', 'bf16')}, fp16, fp32 or fp64"
            )

    @property
    def key(self) -> LoadKey:
        return ("exact", self.arm.dtype, self.numerics.dtype, self.arm.quantize, self.adapter)

    @property
    def adapter(self) -> str | None:
        """`off` or `merged`, or None for a model without adapters. The exact layers cannot run unmerged adapters."""
        return (self.arm.adapter or "merged") if self.run.model.get("adapters") else None

    def build(self) -> ExactModel:
        identity = models.without_adapters(self.run.model)
        return ExactModel(models.build(identity, dtype=self.numerics.dtype, attention="eager", device=self.device))

    def put(self, model: ExactModel, tensors: Mapping[str, Tensor]) -> None:
        super().put(model.held, tensors)
        model.forget()

    def _make(self, model: ExactModel) -> ExactScorer:
        numerics, cached_tokens = self.numerics, self.arm.cached_tokens
        dtype = torch.float32 if numerics.head_in_fp32 and numerics.dtype != "float64" else None
        return ExactScorer(model, temperature=numerics.temperature, head_dtype=dtype, cached_tokens=cached_tokens)

    def made_by(self) -> Contract:
        made = super().made_by()
        return made | {
            "engine": "exact",
            "temperature": self.numerics.temperature,
            "torch": made["torch"] | {"autocast_dtype": "None"},
        }
