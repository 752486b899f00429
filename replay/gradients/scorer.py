from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..backends import kernels
from ..batching import ForwardBatch
from ..hf_scorer import HfScorer
from ..settings import settings
from .update import LossRow

Losses = Callable[[Sequence[LossRow], Any], Any]
"""Maps rows and their current logprobs [N] to the loss."""


class GradientScorer(HfScorer):
    keeps_recorded_rows = False
    pass_of_rows = "per forward and backward pass"

    def attach(self, model: Any, shared: Any = None) -> Any:
        scorer = super().attach(model, shared)
        self._routers = []
        model.train(self.trains)
        checkpoints = self.trains and bool(self.contract.get("gradient_checkpointing"))
        if checkpoints and getattr(model, "supports_gradient_checkpointing", False):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return scorer

    @property
    def adapter(self) -> None:
        """Always None (adapters stay separate), because a merged adapter's weights would get no gradient."""
        return

    @property
    def trains(self) -> bool:
        return bool(self.contract.get("training_mode", False))

    @property
    def has_dropout(self) -> bool:
        drops = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
        attention = float(getattr(getattr(self._model, "config", None), "attention_dropout", 0.0) or 0.0)
        modules = any(isinstance(module, drops) and module.p > 0 for module in self._model.modules())
        return self.trains and (modules or attention > 0)

    @property
    def parameters(self) -> dict[str, Any]:
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def gradient(self, rows: Sequence[LossRow], loss: Losses, seen: Callable[[ForwardBatch, Any], None]) -> list[Any]:
        """Return each parameter's gradient or None. `seen` gets each pass and its logprobs. Raises CannotReplay."""
        return self._within_memory([entry.row for entry in rows], partial(self._gradient, rows, loss, seen))

    def _gradient(self, rows: Sequence[LossRow], loss: Losses, seen: Callable[[ForwardBatch, Any], None]) -> list[Any]:
        self._model.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            stack.enter_context(settings(self.contract["torch"], self.arm))
            stack.enter_context(kernels.forced(self.arm.attention))
            stack.enter_context(torch.enable_grad())
            entries = {id(entry.row): entry for entry in rows}
            for batch in self.batches([entry.row for entry in rows]):
                current_N = self._given(self._scorer.logprobs, batch)
                seen(batch, current_N)
                loss([entries[id(row)] for row in batch.rows], current_N).backward()
        found = [parameter.grad for parameter in self.parameters.values()]
        self._model.zero_grad(set_to_none=True)
        return found
