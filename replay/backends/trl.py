"""Score with TRL's own code on the rebuilt model."""

from __future__ import annotations

import inspect
import warnings
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from ...schemas.documents import Contract
from ...schemas.errors import CannotReplay
from ..batching import ForwardBatch, PackedBatch, PaddedBatch
from ..settings import autocast
from . import packing, trusted
from .head import BatchScorer


class TrlScorer(BatchScorer):
    def __init__(self, model: Any, contract: Contract, *, autocast_dtype: Any, head_in_fp32: bool):
        """Add TRL's fused head to the model. Raises CannotReplay if a recorded function is missing or not TRL's."""
        trusted.check_scoring(contract)
        self.name = str(contract["scoring_function"])
        self._score = None if self.name in trusted.PACKED_LOSSES else _function(self.name)
        self._head = _function(str(contract["fused_lm_head"]))
        self.grad_enabled = bool(contract.get("grad_enabled"))
        device = next(model.parameters()).device
        outputs = ("log_probs", "entropy")
        self._head(
            model, temperature=contract.get("temperature") or 1.0, cast_lm_head_to_fp32=head_in_fp32, outputs=outputs
        )
        model.train(bool(contract.get("training_mode")))
        self._model = model
        self._trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=lambda: autocast(device, autocast_dtype)))
        if autocast_dtype is not None:
            # Like Accelerator.prepare_model with mixed precision, run the model in autocast and return float32.
            from accelerate.utils import convert_outputs_to_fp32

            forward = model.forward

            def in_autocast(*args: Any, **kwargs: Any) -> Any:
                with autocast(device, autocast_dtype):
                    return forward(*args, **kwargs)

            model.forward = convert_outputs_to_fp32(in_autocast)  # type: ignore[no-untyped-call]

    def logprobs(self, batch: ForwardBatch) -> Any:
        device = next(self._model.parameters()).device
        if isinstance(batch, PackedBatch):  # rows form a prefix tree, as in AsyncGRPOTrainer's loss
            rows = packing.RowSpans(batch.spans)
            ids_1W, positions_1W, labels_1W = (
                torch.from_numpy(values_W).to(device).view(1, -1)
                for values_W in (batch.ids_BW, batch.positions_W, batch.labels_W)
            )
            outputs = self._model(
                input_ids=ids_1W, position_ids=positions_1W, shift_labels=labels_1W, fused_lm_head=True, packed=rows
            )
            packing.check_all(rows, self._model.config)
            return outputs.log_probs.flatten()[torch.from_numpy(batch.before_N).to(device)]
        assert isinstance(batch, PaddedBatch)
        assert self._score is not None
        ids_BW, mask_BW = torch.from_numpy(batch.ids_BW).to(device), torch.from_numpy(batch.mask_BW).to(device)
        return batch.last(self._score(self._trainer, self._model, ids_BW, mask_BW, batch.num_kept)[0])


def scores(contract: Contract) -> bool:
    if contract.get("engine") != "trl" or not contract.get("fused_lm_head"):
        return False
    name = str(contract["scoring_function"])
    try:
        _function(str(contract["fused_lm_head"]) if name in trusted.PACKED_LOSSES else name)
    except CannotReplay:
        return False
    return True


def _function(path: str) -> Any:
    if path not in (*trusted.SCORING_FUNCTIONS, *trusted.FUSED_HEADS):
        raise CannotReplay(f"{path} is not part of TRL, so it is not called; replay a trace from TRL's own trainers")
    try:
        with warnings.catch_warnings(action="ignore"):
            return inspect.unwrap(resolve_name(path))  # remove the trainers' profiling wrapper
    except (ImportError, AttributeError) as error:
        why = f"{path} is not installed; install the versions recorded in the trace (see tim-trace info)"
        raise CannotReplay(why) from error
