from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from ...schemas.documents import Contract
from .. import environment
from ..weights.identity import class_path

_CONFIGS: Mapping[str, tuple[str, ...]] = {
    "model_config": (
        "model", "dtype", "quantization", "max_model_len", "logprobs_mode", "seed", "enforce_eager", "head_dtype",
        "override_attention_dtype", "disable_cascade_attn", "disable_sliding_window", "model_impl", "max_logprobs",
    ),
    "cache_config": (
        "block_size", "cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo", "sliding_window",
        "calculate_kv_scales",
    ),
    "parallel_config": (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
        "distributed_executor_backend", "disable_custom_all_reduce",
    ),
    "scheduler_config": (
        "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "async_scheduling", "policy",
    ),
    "compilation_config": ("mode", "level", "backend", "cudagraph_mode", "use_inductor", "custom_ops", "splitting_ops"),
    "attention_config": (
        "backend", "use_cudnn_prefill", "flash_attn_version", "use_prefill_decode_attention",
    ),
    "speculative_config": ("method", "model", "num_speculative_tokens"),
    "load_config": ("load_format",),
}  # fmt: skip
"""vLLM settings that can change a logprob, by section of vLLM's configuration."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "max_tokens", "n",
)  # fmt: skip
_OF_REQUEST = ("max_tokens", "seed", "n")
"""Settings that may differ between requests, so a serving engine's contract omits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    adapters: tuple[tuple[str, int, str], ...] = ()
    """Name, number and path of each LoRA adapter."""
    has_grammar: bool = False

    @classmethod
    def of(cls, params: Iterable[Any], lora_requests: Any) -> Conditions:
        """Return a call's LoRA adapters, and whether it uses a grammar. `lora_requests` is None, one request, or a list
        with one request per prompt."""
        given = lora_requests if isinstance(lora_requests, (list, tuple)) else [lora_requests]
        named = ((str(one.lora_name), int(one.lora_int_id), str(one.lora_path)) for one in given if one is not None)
        has_grammar = any(getattr(one, "structured_outputs", None) is not None for one in params)
        return cls(adapters=tuple(dict.fromkeys(named)), has_grammar=has_grammar)

    @property
    def sentences(self) -> list[str]:
        found = [
            f"the weights of LoRA adapter {name}, used in vLLM's requests, are not recorded; the rollout contract "
            "contains the adapter's name and path"
            for name, _, _ in self.adapters
        ]
        return found + [_GRAMMAR] * self.has_grammar

    @property
    def contract(self) -> Contract:
        adapters = [dict(zip(("name", "number", "path"), adapter, strict=True)) for adapter in self.adapters]
        return {"adapters": adapters, "structured_outputs": self.has_grammar}


_GRAMMAR = (
    "logprobs over the full vocabulary are not recorded for rollouts with structured outputs: vLLM normalises over the "
    "tokens allowed by the grammar, which changes the log ratio d"
)


def engine_contract(llm: Any, arguments: Mapping[str, Any], params: Any, conditions: Conditions) -> Contract:
    config, model = getattr(llm.llm_engine, "vllm_config", None), getattr(model_runner(llm), "model", None)
    return _contract(config, "vllm.LLM.generate", conditions) | {
        "engine_arguments": {name: _said(value) for name, value in arguments.items()},
        "attention_backend": attention_backends(llm),
        "model_class": None if model is None else class_path(model),
        "sampling": dict(sampling_settings(params)),
    }


def async_contract(
    engine: Any, params: Any, model_patches: Sequence[Mapping[str, Any]], conditions: Conditions
) -> Contract:
    """Return the settings that produced a serving engine's logprobs, except those that vary between requests."""
    return _contract(engine.vllm_config, "vllm.AsyncLLM.generate", conditions) | {
        "attention_backend": None,
        "model_class": None,
        "model_patches": [_said(dict(patch)) for patch in model_patches],
        "sampling": dict(sampling_settings(params, of_request=False)),
    }


def _contract(config: Any, function: str, conditions: Conditions) -> Contract:
    import vllm

    resolved: dict[str, dict[str, Any] | None] = {}
    for part, names in _CONFIGS.items():
        section = getattr(config, part, None)
        known = {name: _said(getattr(section, name)) for name in names if hasattr(section, name)}
        resolved[part] = None if section is None else known
    mode = str((resolved.get("model_config") or {}).get("logprobs_mode"))
    return {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "function": function,
        "logprobs_mode": mode,
        "logprobs_of": _MODES.get(mode, mode) + (", with the grammar's mask" if conditions.has_grammar else ""),
        **conditions.contract,
        "config": resolved,
        "device": _device(config),
        "torch": environment.torch_settings(),
        "versions": environment.numeric_versions(),
    }


def sampling_settings(params: Any, *, of_request: bool = True) -> tuple[tuple[str, Any], ...]:
    names = _SAMPLING if of_request else [name for name in _SAMPLING if name not in _OF_REQUEST]
    return tuple((name, getattr(params, name, None)) for name in names)


_MODES = {
    "raw_logprobs": "the model's logits, before temperature, penalties and truncation",
    "processed_logprobs": "the logits after temperature, penalties and truncation: the distribution sampled from",
    "raw_logits": "the model's logits themselves, not normalised",
    "processed_logits": "the processed logits themselves, not normalised",
}


def _said(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _said(getattr(value, f.name, None)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): _said(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_said(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def model_runner(llm: Any) -> Any:
    """Return the model runner, or None if the engine runs in another process."""
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    return getattr(worker, "model_runner", None) or getattr(getattr(worker, "worker", None), "model_runner", None)


def attention_backends(llm: Any) -> list[str] | None:
    groups = getattr(model_runner(llm), "attn_groups", None)
    if not groups:
        return None
    return sorted({group.backend.get_name() for part in groups for group in part})


def _device(config: Any) -> str | None:
    """Return the device's name. A GPU's name comes from vLLM, because torch would initialise CUDA and prevent forks."""
    import torch

    device = getattr(getattr(config, "device_config", None), "device", None)
    if device is None or torch.device(device).type != "cuda":
        return None if device is None else environment.device_name(device)
    from vllm.platforms import current_platform

    if type(current_platform).__name__.startswith("NonNvml"):  # on Jetson, vLLM would ask torch for the name too
        return "cuda"
    return f"cuda {current_platform.get_device_name(torch.device(device).index or 0)}"
