"""Scoring an arm with the exact engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..schemas.contract import Contract
from ..schemas.errors import CannotReplay, option
from ..tracer.weights.reader import Tensor
from .arms import Arm
from .backends import model as models
from .backends.exact.model import ExactModel, check
from .backends.exact.scorer import ExactScorer
from .hf_scorer import HfScorer, LoadKey
from .recorded import RecordedRun


class ExactArmScorer(HfScorer):
    """Scores steps bit-identically in any batch, padding and chunking."""

    hears_routers = False
    keeps_batches = False
    """Other rows of a batch do not affect the bits of a row."""

    def __init__(self, run: RecordedRun, arm: Arm, contract: Contract, device: str):
        super().__init__(run, arm, contract, device)
        if run.model_factory is not None:
            raise CannotReplay(
                f"engine exact: uses its own layers and does not take a model factory; use {option('engine', 'hf')}"
            )
        check(run.model)
        autocast = self.numerics.autocast
        if autocast is not None:
            raise CannotReplay(
                f"engine exact: the recorded pass used autocast to {autocast} over weights of {self.numerics.dtype}, and this engine "
                f"computes in one dtype; add {option('dtype', 'bf16')}, fp16, fp32 or fp64"
            )

    @property
    def key(self) -> LoadKey:
        """Arms with equal keys share a model."""
        return ("exact", self.arm.dtype, self.numerics.dtype, self.arm.quantize, self.adapter)

    @property
    def adapter(self) -> str | None:
        """`off` or `merged`, since the exact layers have no adapters; None for a model without adapters."""
        return (self.arm.adapter or "merged") if self.run.model.get("adapters") else None

    def build(self) -> ExactModel:
        """Build the exact layers over a transformers model without weights. Raises CannotReplay."""
        return ExactModel(
            models.build(
                models.without_adapters(self.run.model),
                dtype=self.numerics.dtype,
                attention="eager",
                device=self.device,
            )
        )

    def put(self, model: ExactModel, tensors: Mapping[str, Tensor]) -> None:
        """Load a version's weights, rounded to the arm's dtype if it has one. Raises CannotReplay."""
        super().put(model.held, tensors)
        model.forget()

    def _make(self, model: ExactModel) -> ExactScorer:
        in_single = self.numerics.head_in_fp32
        return ExactScorer(
            model,
            temperature=self.numerics.temperature,
            head_dtype=torch.float32 if in_single and self.numerics.dtype != "float64" else None,
            cached_tokens=self.arm.cached_tokens,
        )

    def made_by(self) -> Contract:
        """Return the contract of this arm's scores: the recorded one, updated with the settings in use."""
        made = super().made_by()
        return made | {
            "engine": "exact",
            "temperature": self.numerics.temperature,
            "torch": made["torch"] | {"autocast_dtype": "None"},
        }
