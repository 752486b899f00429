from __future__ import annotations

from importlib.metadata import version
from typing import Any

from ...schemas.documents import DTYPES, PACKED_ROWS, Contract, plain
from ...schemas.loss import PPO, SEQUENCE_MEAN, TOKEN, Loss
from .. import environment
from ..weights.identity import class_path, described, dtypes
from .models import numerics

_ENGINE = (
    "strategy", "dtype", "model_dtype", "mixed_precision", "use_remove_padding", "use_fused_kernels", "use_dynamic_bsz",
    "use_torch_compile", "forward_only", "fsdp_size", "ulysses_sequence_parallel_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "sequence_parallel", "full_determinism", "pad_to_length", "pad_to_length_bucket", "entropy_from_logits_with_chunking",
    "reshard_after_forward",
)  # fmt: skip
"""Engine settings (FSDP or Megatron) that can change a logprob."""

FSDP = ("fsdp", "fsdp2")
"""verl's strategies that use FSDP, which casts parameters to the forward pass's dtype."""

_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
}


def scoring_contract(engine: Any, *, source: str, grad: bool, temperature: float | None, dtype: Any) -> Contract:
    """Return the settings that produced a worker's logprobs. `source` is `loss` if the loss computed them, else `recomputed`."""
    settings = engine.engine_config
    model = _model(engine)
    kind = "micro_batch_size_per_gpu", "max_token_len_per_gpu"
    rows, tokens = kind if grad else tuple(f"infer_{name}" for name in kind)
    is_fsdp = getattr(settings, "strategy", None) in FSDP
    cast = parameters = str(getattr(engine, "_autocast_dtype", None)).removeprefix("torch.")
    if is_fsdp and cast == "None":  # verl 0.7 autocasts to bfloat16 even if parameters are cast to another dtype
        precision = (getattr(settings, "mixed_precision", None) or {}).get("param_dtype", "bf16")
        cast, parameters = "bfloat16", DTYPES.get(precision, precision)
    casts = {"parameters_dtype": parameters} if is_fsdp else {}
    autocast = None if cast in ("None", "float32") else cast  # verl does not use autocast in these cases
    return {
        "engine": "verl",
        "engine_version": version("verl"),
        "source": source,
        "function": f"{type(engine).__module__}.{type(engine).__qualname__}",
        "grad_enabled": grad,
        "settings": {name: plain(getattr(settings, name)) for name in _ENGINE if hasattr(settings, name)},
        "autocast": autocast,
        "temperature": temperature,
        "logprobs_of": "logits divided by the temperature, over every row of the head",
        "logprobs_dtype": str(dtype).removeprefix("torch."),
        "packing": PACKED_ROWS if getattr(settings, "use_remove_padding", False) else None,
        "prompt_padding_side": "right",
        "rows_a_forward": getattr(settings, rows, None),
        "tokens_a_forward": getattr(settings, tokens, None) if getattr(settings, "use_dynamic_bsz", False) else None,
        "parallelism": {"world_size": _world_size(), "data_parallel_size": engine.get_data_parallel_size()},
        "device": environment.device_name(next(model.parameters()).device),
        "model": casts
        | (numerics(model) if hasattr(model, "config") else {"class": class_path(model), "dtypes": dtypes(model)}),
        "torch": environment.torch_settings() | {"autocast_dtype": autocast},
        "versions": environment.numeric_versions(),
    }


def configured_contract(config: Any) -> Contract:
    return {
        "engine": "verl",
        "engine_version": version("verl"),
        "known_from": "the run's configuration",
        "strategy": config.actor_rollout_ref.actor.strategy,
        "temperature": config.actor_rollout_ref.rollout.temperature,
        "versions": environment.numeric_versions(),
    }


def configured_rollout(config: Any) -> Contract:
    rollout = config.actor_rollout_ref.rollout
    return {
        "engine": rollout.name,
        "known_from": "the run's configuration",
        "dtype": rollout.get("dtype"),
        "sampling": sampling(config),
        "versions": environment.numeric_versions(),
    }


def sampling(config: Any) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": 0.0,
        "repetition_penalty": rollout.get("repetition_penalty", 1.0) if rollout.name != "vllm" else 1.0,
    }


def model_identity(engine: Any) -> dict[str, Any]:
    model, config = _model(engine), getattr(engine.model_config, "hf_config", None)
    return described(model, getattr(engine.model_config, "path", None), getattr(config, "to_dict", dict)())


def policy_loss(config: Any) -> tuple[Loss | None, dict[str, Any]]:
    """Return the policy loss (None if unknown) and the loss settings for which `Loss` has no field."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.get("rollout_correction") or {}
    mode, aggregation = actor.policy_loss.get("loss_mode", "vanilla"), _AGGREGATIONS.get(actor.loss_agg_mode)
    if mode not in ("vanilla", "gspo") or aggregation is None:
        return None, {}
    with_kl = bool(actor.use_kl_loss)
    if with_kl and actor.kl_loss_type not in ("low_var_kl", "k3"):
        return None, {}
    weights = correction.get("rollout_is")
    others = {
        "entropy_coeff": actor.entropy_coeff or None,
        "rollout_rs": correction.get("rollout_rs"),
        "bypass_loss_type": correction.get("loss_type") if correction.get("bypass_mode") else None,
    }
    loss = Loss(
        kind=PPO, level=SEQUENCE_MEAN if mode == "gspo" else TOKEN,
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_hard=actor.get("clip_ratio_c") if mode == "vanilla" else None,
        denominator="rollout" if correction.get("bypass_mode") else "train", aggregation=aggregation,
        kl_coefficient=actor.kl_loss_coef if with_kl else 0.0,
        correction="none" if weights is None else f"{weights}_truncate",
        correction_high=None if weights is None else float(str(correction.get("rollout_is_threshold")).split("_")[-1]),
    )  # fmt: skip
    return loss, {f"loss/{name}": value for name, value in others.items() if value is not None}


def _model(engine: Any) -> Any:
    """Return the engine's model, or its first chunk under virtual pipeline parallelism."""
    return engine.module[0] if isinstance(engine.module, (list, tuple)) else engine.module


def _world_size() -> int:
    import torch

    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
