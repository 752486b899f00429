from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

from ...schemas.documents import PREFIX_TREE, Contract, plain
from .. import environment
from ..weights.identity import class_path, described, dtypes
from ..weights.layout import model_parameters, num_elements
from .models import numerics, trained_model
from .trl_release import SERVER_URL, TEMPERATURE, find, fused_lm_head


def scoring_contract(trainer: Any, *, source: str, grad: bool) -> Contract:
    """Return the settings that produced logprobs. `source` is `loss`, or `recomputed` for a separate forward pass."""
    return _contract(trainer, type(trainer)._get_per_token_logps_and_entropies, source=source, grad=grad)


def packed_contract(trainer: Any) -> Contract:
    contract = _contract(trainer, type(trainer).compute_loss, source="loss", grad=True)
    none: Contract = {"rows_a_forward": None, "prompt_padding_side": None, "response_padding_side": None}
    return contract | none | {"packing": PREFIX_TREE}


def _contract(trainer: Any, scorer: Any, *, source: str, grad: bool) -> Contract:
    model = trained_model(trainer)
    args, accelerator = trainer.args, trainer.accelerator
    return {
        "engine": "trl",
        "source": source,
        "scoring_function": f"{scorer.__module__}.{scorer.__qualname__}",
        "fused_lm_head": fused_lm_head(),
        "grad_enabled": grad,
        "training_mode": bool(trainer.model.training),
        "autocast": accelerator.mixed_precision,
        "cast_lm_head_to_fp32": bool(getattr(args, "cast_lm_head_to_fp32", False)),
        "gradient_checkpointing": bool(args.gradient_checkpointing),
        "torch_compile": bool(args.torch_compile),
        "temperature": find(trainer, TEMPERATURE),
        "logprobs_of": "logits divided by the temperature, over the whole vocabulary",
        "prompt_padding_side": "left",
        "response_padding_side": "right",
        "rows_a_forward": args.per_device_train_batch_size,
        "device": environment.device_name(accelerator.device),
        "parallelism": {
            "world_size": accelerator.num_processes,
            "distributed_type": str(accelerator.distributed_type).rpartition(".")[2],
        },
        "model": numerics(model),
        "torch": environment.torch_settings() | {"autocast_dtype": str(autocast_dtype(accelerator))},
        "versions": environment.numeric_versions(),
    }


def reference_contract(trainer: Any) -> Contract:
    contract = scoring_contract(trainer, source="recomputed", grad=False)
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        return contract | {"weights": "the trained model with its adapter off"}
    return contract | {"weights": "the reference model", "model": numerics(trainer.accelerator.unwrap_model(reference))}


def generation_contract(trainer: Any) -> Contract:
    continuous = bool(getattr(trainer, "use_transformers_continuous_batching", False))
    return _rollouts(trainer, "transformers", "generate_batch" if continuous else "generate") | {
        "logprobs": None,
        "logprobs_note": "generation with transformers returns no logprobs, so this pass has no scores",
        "device": environment.device_name(trainer.accelerator.device),
        "model": numerics(trained_model(trainer)),
        "torch": environment.torch_settings(),
    }


def server_info(trainer: Any) -> Any:
    """Fetch a vLLM server's configuration from its development endpoint. Raises OSError."""
    with urlopen(f"{find(trainer, SERVER_URL)}/server_info?config_format=json", timeout=10) as response:
        return json.load(response)["vllm_config"]


def server_contract(trainer: Any, server: Any) -> Contract:
    return _rollouts(trainer, "vllm", "a server, through TRL's VLLMClient.generate") | {"server": server}


def worker_contract(trainer: Any, server: Any) -> Contract:
    return _rollouts(trainer, "vllm" if uses_server(trainer) else None, class_path(trainer.rollout_worker)) | {
        "server": server,
        "weights_note": "policy_version is from a group's first request; in-flight requests switch to newer weights",
    }


def _rollouts(trainer: Any, engine: str | None, function: str) -> Contract:
    settings = {"sampling": sampling(trainer), "versions": environment.numeric_versions()}
    return {"engine": engine, "function": function, **settings}


def uses_server(trainer: Any) -> bool:
    return type(trainer.rollout_worker).__module__.startswith("trl.")


def sampling(trainer: Any) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
    settings = {name: getattr(trainer, name, getattr(trainer.args, name, None)) for name in names}
    return settings | dict(getattr(trainer.args, "generation_kwargs", None) or {})


def sampling_columns(trainer: Any) -> dict[str, Any]:
    settings = sampling(trainer)
    found = {name: settings.get(name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    return found | {"min_p": settings.get("min_p") or 0.0, "max_tokens": settings.get("max_completion_length")}


def model_identity(trainer: Any) -> dict[str, Any]:
    model = trained_model(trainer)
    peft = getattr(model, "peft_config", None) or {}
    configs = {str(name): plain(config.to_dict()) for name, config in peft.items() if hasattr(config, "to_dict")}
    below = model.get_base_model() if configs else model
    identity = described(below, getattr(below, "name_or_path", None), below.config.to_dict())
    if configs:
        trained = sum(num_elements(p) for p in model_parameters(model) if p.requires_grad)
        identity |= {"num_parameters": sum(dtypes(model).values()), "dtypes": dtypes(model), "adapters": configs}
        identity |= {"active_adapter": str(model.active_adapter), "num_trained_parameters": trained}
    return identity


def autocast_dtype(accelerator: Any) -> Any:
    import torch

    with accelerator.autocast():
        kind = accelerator.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
