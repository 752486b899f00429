"""Router choices of a TRL trainer's model, read while its own scoring runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..routing import RouterTap, Routing, is_mixture, of_cells, routers
from .session import Session
from .trainer_tensors import trained_model
from .trl_batches import left_padded, right_padded
from .trl_state import TrainRows

_WHAT = "router choices are not recorded"


class RoutingTap:
    """Listens to the model's routers during one scoring call."""

    def __init__(self, session: Session, tap: RouterTap, rows: TrainRows, call: dict[str, Any]):
        self._session, self._tap, self._rows = session, tap, rows
        self._widths = call["input_ids"].shape[1] - call["logits_to_keep"], call["logits_to_keep"]

    def __enter__(self) -> RoutingTap:
        self._tap.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tap.__exit__(*exception)

    def routing(self) -> Routing | None:
        """What the routers chose for each prompt and response token, row after row; None where it cannot be read."""
        prompt, response = self._rows.prompt_lengths, self._rows.response_lengths
        mask_BW = np.hstack([left_padded(self._widths[0], prompt), right_padded(self._widths[1], response)])
        heard = self._tap.forwards()
        found = of_cells(heard, mask_BW) if heard else None
        if found is None:
            why = self._tap.problem or "its routers did not see each token once"
            self._session.note(f"{_WHAT}: {why}")
        return found


def routing_tap(session: Session, trainer: Any, rows: TrainRows | None, call: dict[str, Any]) -> RoutingTap | None:
    """What listens to the routers during a call that gives the `train` pass, where that was asked for."""
    if rows is None or not session.order.routing or trainer.args.torch_compile:
        return None
    known = routers(trainer.accelerator.unwrap_model(call["model"]))
    return RoutingTap(session, RouterTap(known), rows, call) if known else None


def tell_of_routing(session: Session, trainer: Any) -> None:
    """Say why a mixture of experts' router choices are not recorded, where they are not."""
    model = trained_model(trainer)
    known = routers(model)
    if not is_mixture(model):
        if session.order.routing:
            session.note(f"{_WHAT}: {type(model).__name__} is no mixture of experts; record it without --routing")
    elif session.order.routing and trainer.args.torch_compile:
        session.note(f"{_WHAT}: routers inside a compiled model cannot be listened to; record without torch_compile")
    elif not known:
        session.note(f"{_WHAT}: {type(model).__name__} has no router module that chooses before its experts run")
    elif not session.order.routing:
        slots = sum(router.num_slots or 0 for router in known)
        cost = f", about {6 * slots:,} bytes a token," if slots else ""
        session.note(f"{_WHAT}: `replay --routing recorded` and routing agreement need them; record with --routing{cost}"
                     " to keep them")  # fmt: skip
