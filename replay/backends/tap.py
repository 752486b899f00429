"""Distributions of a replay's captured rows, from the hidden states of the scoring forward.

Shapes: B rows in a forward pass, W padded row length, P positions in the flattened forward pass, T response tokens in a
row, H hidden width, C tokens per chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from ...schemas.capture import Capture
from ...tracer.dense import Distribution
from ...tracer.logits import multiplier
from ...tracer.projection import Projection
from ..batching import ForwardBatch, responses
from .head import cut


class HiddenTap:
    """Recorder of the backbone's hidden states while rows are scored.

    The recorder is a read-only forward hook and does not affect scores. The hidden states of captured rows are
    projected a second time, so a captured logit may differ in its last bit from the one used for scoring.
    """

    def __init__(self, scorer: Any, batch: ForwardBatch):
        self._scorer = scorer
        self._batch = batch
        self._parts: list[Any] = []
        self._handle: Any = None

    def __enter__(self) -> HiddenTap:
        if any(row.captured for row in self._batch.rows):
            self._handle = self._scorer.backbone.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    @property
    def heard(self) -> bool:
        """True if hidden states were recorded."""
        return bool(self._parts)

    def _keep(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        for name in ("last_hidden_state", "logits"):
            if getattr(outputs, name, None) is not None:
                outputs = getattr(outputs, name)
        self._parts.append((outputs if hasattr(outputs, "detach") else outputs[0]).detach())

    def distributions(self, projection: Projection, capture: Capture, temperature: float) -> dict[str, Distribution]:
        """Return sequence name -> distributions on the host, for captured rows."""
        import torch

        # With a KV cache the positions arrive in several consecutive forwards.
        hidden_BWH = torch.cat(self._parts, dim=1) if len(self._parts) > 1 else self._parts[0]
        hidden_PH = hidden_BWH.flatten(0, 1)
        found = {}
        for row, places_T in zip(self._batch.rows, responses(self._batch, self._batch.before_N), strict=True):
            if row.captured:
                rows_TH = hidden_PH[torch.from_numpy(places_T).to(hidden_PH.device)]
                found[row.seq_id] = projection.distribution([rows_TH], capture, temperature, "cpu")
        return found


def cutting(top_k: int | None, top_p: float | None, temperature: float, dtype: Any) -> Any:
    """Return a function that casts logits to `dtype` and sets tokens cut by top-k and top-p to -inf; None if it has no effect."""
    if top_k is None and top_p is None and dtype is None:
        return None

    def then(logits_CV: Any) -> Any:
        import torch

        logits_CV = logits_CV if dtype is None else logits_CV.to(dtype)
        if top_k is None and top_p is None:
            return logits_CV
        wide_CV = logits_CV if dtype or logits_CV.dtype == torch.float64 else logits_CV.float()
        kept_CV = cut(wide_CV / temperature, top_k, top_p)
        return logits_CV.masked_fill(kept_CV == float("-inf"), float("-inf"))

    return then


def head_contract(model: Any, dtype: Any, logits_dtype: Any) -> dict[str, Any]:
    """Return the contract entry for computing logits from captured hidden states, with weights of the policy version
    scored.

    logits = cap(scale * (round(hidden) @ round(weight).T + round(bias))), rounded to the projection's dtype.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    named = dict(model.named_parameters(remove_duplicate=False))

    def names(parameter: Any) -> list[str]:
        return sorted(name for name, value in named.items() if value is parameter)

    return {
        "weight": names(head.weight),
        "bias": [] if head.bias is None else names(head.bias),
        "weight_dtype": _name(head.weight.dtype),
        "projection_dtype": None if dtype is None else _name(dtype),
        "logits_dtype": None if logits_dtype is None else _name(logits_dtype),
        "scale": multiplier(config),
        "softcap": getattr(config, "final_logit_softcapping", None),
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
