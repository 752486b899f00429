"""Scoring with a user's own model that returns only logits.

Shapes: B rows in a forward pass, W padded row length, N scored tokens, T response tokens in a row, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from ...schemas.errors import CannotReplay
from ..arm_option import FACTORY, phrase
from ..arms import Arm
from ..batching import PaddedBatch
from .head import BatchScorer, Head


def gives_hidden(model: Any) -> bool:
    """Return True if the model has a backbone and a head that can be called separately, as in transformers."""
    return hasattr(model, "base_model") and hasattr(model, "get_output_embeddings") and hasattr(model, "config")


class ModuleScorer(BatchScorer):
    """Calls `model(input_ids=[B, W], attention_mask=[B, W])`, which returns logits [B, W, V] or has them in `.logits`."""

    name = "tim_trace.replay.backends.module.ModuleScorer"

    def __init__(self, model: Any, head: Head, arm: Arm):
        """Raise CannotReplay if the arm has changes that a model returning only logits does not support."""
        for name in arm.lacking(FACTORY):
            raise CannotReplay(
                f"{phrase(name, getattr(arm, name))}: cannot be changed, because the model factory's model returns only logits; give it "
                "base_model, get_output_embeddings and config, like transformers' models"
            )
        self._model = model.eval()
        self._head = head

    def logprobs(self, batch: PaddedBatch) -> Any:
        device = next(self._model.parameters()).device
        ids_BW, mask_BW = torch.from_numpy(batch.ids_BW).to(device), torch.from_numpy(batch.mask_BW).to(device)
        logits_BWV = self._model(input_ids=ids_BW, attention_mask=mask_BW)
        logits_BWV = getattr(logits_BWV, "logits", logits_BWV)
        parts = []
        for first, row, logits_WV, ids_W in zip(batch.first_B.tolist(), batch.rows, logits_BWV, ids_BW, strict=True):
            end = first + len(row.response_ids)
            logits_TV = logits_WV[first - 1 : end - 1]
            result = self._head.logits_dtype or torch.promote_types(logits_TV.dtype, torch.float32)
            parts.append(self._head.taken(logits_TV.to(result, copy=True), ids_W[first:end]))
        return torch.cat(parts)
