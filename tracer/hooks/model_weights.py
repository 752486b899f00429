"""Decides whether a trainer's weights are recorded, and which of the tensors this process records."""

from __future__ import annotations

from typing import Any

from ..weights.layout import flat_parameter, is_sharded, model_parameters, model_tensors, num_elements
from .session import Session

_REMEDY = "replaying needs them; record with --weights delta, or pass the run's checkpoints with --weights-from DIR"


class KeptWeights:
    """Records the weights of one trained model, each policy version once."""

    def __init__(self, session: Session):
        self._session = session
        self._is_kept: bool | None = None
        self._version: int | None = None

    def keep(self, version: int, model: Any, *, is_first: bool) -> None:
        """Record a policy version once. The first process (`is_first`) also records tensors that are not sharded."""
        if self._version == version:
            return
        self._version = version
        if self._is_kept is None:
            self._is_kept = keeps_weights(self._session, model)
        if self._is_kept:
            self._session.recorder.add_weights(version, own_tensors(model, is_first=is_first))


def keeps_weights(session: Session, model: Any) -> bool:
    """Return True if this run's weights are recorded; otherwise note the reason."""
    order = session.order
    if order.weights == "none":
        return False
    problem = _problem(model)
    if problem:
        session.note(f"weights are not recorded: {problem}")
        return False
    num_bytes = sum(num_elements(parameter) * parameter.element_size() for parameter in model_parameters(model))
    if order.weights == "auto" and num_bytes > order.weights_below:
        session.note(
            f"weights are not recorded: the model has {num_bytes / 1e9:.2f} GB, more than --weights-below "
            f"{order.weights_below / 1e9:g}GB; {_REMEDY}"
        )
        return False
    return True


def own_tensors(model: Any, *, is_first: bool) -> dict[str, Any]:
    """Return this process's shards; in the first process, also the tensors that are not sharded."""
    tensors = model_tensors(model).items()
    return {name: t for name, t in tensors if is_first or (is_sharded(t) and not getattr(t, "is_replicated", False))}


def _problem(model: Any) -> str | None:
    if any(getattr(parameter, "ds_id", None) is not None for parameter in model.parameters()):
        return f"DeepSpeed ZeRO-3 shards cannot be read from here; {_REMEDY}"
    flats = [flat for module in model.modules() if (flat := flat_parameter(module)) is not None]
    if any(any(flat._param_extensions) or not all(flat._contiguities) for flat in flats):
        return f"FSDP1 flattened parameters that are also sharded in another way; use FSDP2, or: {_REMEDY}"
    return None
