"""Read hidden states and router choices while a TRL trainer scores.

Shapes: B rows, T padded response width, H hidden width, W padded prompt and response width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..dense import Distribution, Projection
from ..routing import Router, RouterTap, Routing, is_mixture, of_cells, routers
from ..weights.layout import is_sharded, model_parameters
from ..writer import Part
from .models import trained_model
from .session import Session
from .trl_batches import left_padded, right_padded
from .trl_contract import autocast_dtype
from .trl_release import TEMPERATURE, find
from .trl_state import TrainRows

_WHAT = "router choices are not recorded"


class HeadTap:
    """Keeps last-layer hidden states from one scoring call, to compute the distributions of selected rows."""

    def __init__(self, session: Session, trainer: Any, call: dict[str, Any], rows: np.ndarray, lengths: np.ndarray):
        self.rows = rows
        self._session = session
        self._trainer = trainer
        self._lengths = lengths
        self._model = _language_model(trainer, call["model"])
        self._prompt_width = call["input_ids"].shape[1] - call["logits_to_keep"]
        self._rows_a_forward = call.get("batch_size") or len(call["input_ids"])
        self._hidden: dict[int, Any] = {}
        self._num_forwards = 0

    @staticmethod
    def problem(trainer: Any, model: Any) -> str | None:
        weight = _language_model(trainer, model).get_output_embeddings().weight
        # Check all parameters, not only the head. Under FSDP, the head may look whole because it is gathered for a
        # forward pass, but it is freed afterwards.
        is_whole = not any(map(is_sharded, model_parameters(model)))
        if not is_whole or weight.ndim != 2 or getattr(weight, "ds_id", None) is not None:
            return "trainer distributions are not captured: the model's head is sharded across processes (FSDP, ZeRO-3)"
        return None

    def listening(self) -> Any:
        keep = partial(self._session.record, Part.DISTRIBUTIONS, self._keep)
        return self._model.base_model.register_forward_hook(keep)

    def _keep(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        first = self._num_forwards * self._rows_a_forward
        self._num_forwards += 1
        hidden_BTH = getattr(outputs, "last_hidden_state", None)
        if hidden_BTH is None:
            hidden_BTH = outputs[0]
        for row in self.rows[(self.rows >= first) & (self.rows < first + len(hidden_BTH))]:
            # The hidden state at position t - 1 predicts the token at position t.
            begin = self._prompt_width - 1
            self._hidden[int(row)] = hidden_BTH[int(row) - first, begin : begin + int(self._lengths[row])].detach()

    def distribution(self) -> Distribution | None:
        if len(self._hidden) != len(self.rows):
            return None
        projection = Projection(model=self._model, dtype=self._dtype())
        hidden = [self._hidden[int(row)] for row in self.rows]
        return projection.distribution(hidden, self._session.capture, find(self._trainer, TEMPERATURE))

    def _dtype(self) -> Any:
        """Return the fused head's compute dtype, or None to use the hidden states' dtype."""
        import torch

        if getattr(self._trainer.args, "cast_lm_head_to_fp32", False):
            return torch.float32
        return autocast_dtype(self._trainer.accelerator)


def _language_model(trainer: Any, model: Any) -> Any:
    unwrapped = trainer.accelerator.unwrap_model(model)
    return unwrapped.get_base_model() if hasattr(unwrapped, "peft_config") else unwrapped


class RoutingTap(RouterTap):
    def __init__(self, session: Session, known: list[Router], rows: TrainRows, call: dict[str, Any]):
        super().__init__(known)
        self._session, self._rows = session, rows
        self._widths = call["input_ids"].shape[1] - call["logits_to_keep"], call["logits_to_keep"]

    def routing(self) -> Routing | None:
        prompt, response = self._rows.prompt_lengths, self._rows.response_lengths
        mask_BW = np.hstack([left_padded(self._widths[0], prompt), right_padded(self._widths[1], response)])
        found = of_cells(self.forwards(), mask_BW)
        if found is None:
            why = self.problem or "the model's routers did not process each token exactly once"
            self._session.note(f"{_WHAT}: {why}")
        return found


def routing_tap(session: Session, trainer: Any, rows: TrainRows | None, call: dict[str, Any]) -> RoutingTap | None:
    if rows is None or not session.order.routing or trainer.args.torch_compile:
        return None
    known = routers(trainer.accelerator.unwrap_model(call["model"]))
    return RoutingTap(session, known, rows, call) if known else None


def tell_of_routing(session: Session, trainer: Any) -> None:
    model = trained_model(trainer)
    known = routers(model)
    if not is_mixture(model):
        if session.order.routing:
            session.note(f"{_WHAT}: {type(model).__name__} is not a mixture of experts; record it without --routing")
    elif session.order.routing and trainer.args.torch_compile:
        session.note(f"{_WHAT}: routers inside a compiled model cannot be read; record without torch_compile")
    elif not known:
        session.note(f"{_WHAT}: {type(model).__name__} has no router module that runs before its experts")
    elif not session.order.routing:
        slots = sum(router.num_slots or 0 for router in known)
        cost = f" (about {6 * slots:,} bytes per token)" if slots else ""
        session.note(
            f"{_WHAT}, but `replay --routing recorded` and routing agreement need them; record with --routing{cost}"
        )
