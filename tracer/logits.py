"""Scale and cap logits after the projection, and reduce them to the top K.

Shapes: T tokens, V vocabulary, K kept tokens.
"""

from __future__ import annotations

from typing import Any

_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")


def scaled(logits_TV: Any, config: Any) -> Any:
    """Apply a model's logit multiplier and soft cap, if any; `config` is the text model's config."""
    import torch

    scale = multiplier(config)
    if scale is not None:
        logits_TV = logits_TV * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap


def multiplier(config: Any) -> float | None:
    """Return the factor by which a model multiplies its logits; None if it does not."""
    scale = next((value for name in _SCALES if (value := getattr(config, name, None)) is not None), None)
    divisor = getattr(config, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    return scale


def top_k_with_tail(logits_TV: Any, k: int, temperature: float) -> tuple[Any, Any, Any]:
    """Return the K most probable tokens in each row, their logprobs, and the log of the total probability of all
    others.

    Returns ids [T, K] int32, logprobs [T, K] float32 and tail [T] float32, nats; the tail is -inf if K is the whole
    vocabulary. Computed in float32, or float64 if the logits are.
    """
    import torch

    k = min(k, logits_TV.shape[-1])
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    logprobs_TV = torch.log_softmax(wide_TV / temperature, dim=-1)
    top = logprobs_TV.topk(k, dim=-1)
    rest_TV = logprobs_TV.scatter(-1, top.indices, float("-inf"))
    return top.indices.to(torch.int32), top.values.float(), torch.logsumexp(rest_TV, dim=-1).float()
