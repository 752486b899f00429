"""The contracts that a scenario's frameworks would record, in the form written by the hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from scenarios import NUMERICS, Scenario
from tim_trace.tracer import environment

FULL, PARTIAL, NONE = "full", "partial", "none"

_MODES = {
    "raw_logprobs": "the model's logits, before temperature, penalties and truncation",
    "processed_logprobs": "the logits after temperature, penalties and truncation: the distribution sampled from",
}
_NAMES = (("vllm", "trl"), ("sglang", "slime"), ("vllm", "verl"), ("sglang", "verl"), ("vllm", "prime-rl"))
"""Engine and trainer, as named in a partial contract."""


def rollout_contract(
    scenario: Scenario, belief: Mapping[str, Any], level: str, replica: int | None
) -> dict[str, Any] | None:
    """Return the engine's contract; None if nothing is known about it."""
    own = {} if replica is None else {"replica": replica}
    if level == NONE:
        return None
    if belief.get("same_engine"):
        return _one_engine(scenario, level)
    if level == PARTIAL:
        return {"engine": _NAMES[scenario.seed % len(_NAMES)][0], **own}
    mode = belief.get("logprobs_mode", "processed_logprobs")
    sampling = scenario.sampling
    return {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "function": "vllm.LLM.generate",
        "logprobs_mode": mode,
        "logprobs_of": _MODES[mode],
        "config": {
            "model_config": {
                "model": scenario.model.recipe.name,
                "dtype": str(NUMERICS[scenario.numerics][0]["dtype"]),
                "quantization": belief.get("quantization"),
                "logprobs_mode": mode,
                "head_dtype": str(NUMERICS[scenario.numerics][0]["dtype"]),
                "seed": 0,
            },
            "cache_config": {
                "cache_dtype": "auto",
                "enable_prefix_caching": scenario.seed % 2 == 0,
                "sliding_window": None,
            },
            "parallel_config": {
                "tensor_parallel_size": NUMERICS[scenario.numerics][0].get("shards", 1),
                "data_parallel_size": belief.get("replicas", 1),
            },
        },
        "attention_backend": ["CPU_ATTN"],
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "max_tokens": scenario.max_tokens,
            "n": 1,
        },
        "torch": environment.torch_settings(),
        "versions": environment.numeric_versions(),
        **own,
    }


def train_contract(scenario: Scenario, belief: Mapping[str, Any], level: str) -> dict[str, Any] | None:
    """Return the trainer's contract; None if nothing is known about it."""
    if level == NONE:
        return None
    if belief.get("same_engine"):
        return _one_engine(scenario, level)
    if level == PARTIAL:
        adapters = {"model": {"adapters": belief["adapters"]}} if "adapters" in belief else {}
        return {"engine": _NAMES[scenario.seed % len(_NAMES)][1], **adapters}
    numerics = NUMERICS[scenario.numerics][1]
    dtype, autocast = numerics["dtype"], numerics.get("autocast")
    size = sum(value.numel() for value in scenario.states[0].values())
    return {
        "engine": "trl",
        "source": "recomputed",
        "grad_enabled": False,
        "training_mode": True,
        "autocast": "no" if autocast is None else str(autocast).removeprefix("torch.").replace("bfloat", "bf"),
        "cast_lm_head_to_fp32": False,
        "gradient_checkpointing": False,
        "torch_compile": False,
        "temperature": belief.get("trainer_temperature", scenario.sampling.temperature),
        "logprobs_of": "logits divided by the temperature, over the whole vocabulary",
        "prompt_padding_side": "left",
        "response_padding_side": "right",
        "rows_a_forward": scenario.trainer_rows,
        "parallelism": {"world_size": 1, "distributed_type": "NO"},
        "model": {
            "class": f"transformers.{scenario.model.class_name}",
            "dtypes": {str(dtype).removeprefix("torch."): size},
            "attention": "sdpa",
            "quantization": None,
            "adapters": belief.get("adapters", []),
        },
        "torch": environment.torch_settings() | {"autocast_dtype": str(autocast)},
        "versions": environment.numeric_versions(),
    }


def _one_engine(scenario: Scenario, level: str) -> dict[str, Any]:
    if level == PARTIAL:
        return {"engine": "exact"}
    return {
        "engine": "exact",
        "dtype": str(NUMERICS[scenario.numerics][0]["dtype"]).removeprefix("torch."),
        "temperature": scenario.sampling.temperature,
        "logprobs_of": "logits divided by the temperature, over the whole vocabulary",
        "versions": environment.numeric_versions(),
        "threads": torch.get_num_threads(),
    }
