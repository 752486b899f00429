"""Allowlists of code that a replay may run because a trace names it: TRL functions, transformers models, torch names.

A trace may come from an untrusted source. Code outside these lists runs only if the user allows it with
`--model-factory` or `--allow-kernel`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ...schemas.documents import Contract
from ...schemas.errors import CannotReplay, option
from ...schemas.lazy import collector_paused
from . import packing
from .kernels import KERNELS

SCORING_FUNCTIONS = (
    "trl.trainer.grpo_trainer.GRPOTrainer._get_per_token_logps_and_entropies",
    "trl.trainer.rloo_trainer.RLOOTrainer._get_per_token_logps_and_entropies",
)
PACKED_LOSSES = ("trl.experimental.async_grpo.async_grpo_trainer.AsyncGRPOTrainer.compute_loss",)
"""Functions that score packed rows. A replay runs the model in the same way, without calling these functions."""
FUSED_HEADS = ("trl.trainer.utils.add_fused_lm_head",)
_FLASH = {f"flash_attention_{number}": f"is_flash_attn_{number}_available" for number in (2, 3, 4)}
"""Maps an attention to transformers' check for its package. If the package is missing, a hub kernel is used."""
KERNELS_VARIABLE = "TIM_TRACE_ALLOW_KERNEL"
"""Environment variable that allows more hub kernels (comma-separated names)."""
KERNEL_NOT_ALLOWED, NOT_INSTALLED, UNKNOWN, NEEDS_16_BITS = (
    "kernel-not-allowed", "attention-not-installed", "attention-unknown", "attention-needs-16-bits",
)  # fmt: skip
EXPERTS_UNKNOWN = "experts-unknown"
REFUSED, CONDITIONS, UNEXPLAINED, OTHER_INPUTS = "refused", "conditions", "unexplained", "other-inputs"
WHY = {
    KERNEL_NOT_ALLOWED: "the recorded attention {name} is code from the hub; allow it with --allow-kernel",
    NOT_INSTALLED: "the recorded attention {name} is not installed here, or needs a GPU",
    UNKNOWN: "the recorded attention {name} is unknown",
    NEEDS_16_BITS: "the recorded attention {name} computes in bf16 and fp16 only",
    EXPERTS_UNKNOWN: "the recorded experts implementation {name} is not one of torch's implementations",
    REFUSED: "the recorded setup cannot run here",
    CONDITIONS: "settings, versions or hardware differ here",
    UNEXPLAINED: "something unrecorded differs: all recorded settings, versions and hardware are the same here",
    OTHER_INPUTS: "weights, tokens or settings are not those of the recorded pass (hardware cannot explain this much)",
}
"""Reasons why the recorded bits were not reproduced."""
ROUNDING_NATS = 0.1
"""Mean |d| (nats) well above published mismatches of 16 bits. In 32 bits, 0.01 is well above the error of TF32."""
ATTENTIONS = (*dict.fromkeys(kernel.implementation for kernel in KERNELS.values()), *_FLASH, packing.NAME)
EXPERTS = ("eager", "batched_mm", "grouped_mm")
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MODEL_LISTS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""transformers' lists of models that return token logits."""

_DROPPED = frozenset({
    "auto_map", "custom_pipelines", "trust_remote_code", "_name_or_path", "name_or_path", "_commit_hash", "code_revision",
    "quantization_config", "kernel_config", "use_kernels", "_kernel_config",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "use_pretrained_backbone", "backbone", "backbone_kwargs", "num_labels", "id2label", "label2id",
})  # fmt: skip
"""Config fields to drop: labels, and fields that would make transformers fetch or import something."""
_COUNTS = re.compile(r"(^|_)(num|n|depths?)(_|$)|layer|block")
_MOST = 1_000_000


_Unreadable = Annotated[str, msgspec.Meta(pattern="^unreadable")]
_Switch = bool | _Unreadable | None
_Precision = Literal["none", "ieee", "tf32", "bf16"] | None


class _Torch(msgspec.Struct):
    autocast_dtype: str | None = None
    float32_matmul_precision: Annotated[str, msgspec.Meta(pattern="^(highest|high|medium)$|^unreadable")] | None = None
    fp32_precision: _Precision = None
    cuda_matmul_fp32_precision: _Precision = None
    cudnn_allow_tf32: _Switch = None
    cuda_bf16_reduced_precision_reduction: _Switch = None
    cuda_fp16_reduced_precision_reduction: _Switch = None
    cudnn_deterministic: bool | None = None
    cudnn_benchmark: bool | None = None
    cuda_preferred_blas: str | None = None
    cuda_preferred_linalg: str | None = None
    cublas_workspace_config: Annotated[str, msgspec.Meta(pattern=r"^(:\d{1,7}:\d{1,3}){0,8}\Z")] | None = None
    deterministic_algorithms: bool | None = None
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    mkldnn: bool | None = None
    sdp_flash: bool | None = None
    sdp_mem_efficient: bool | None = None
    sdp_math: bool | None = None
    sdp_cudnn: bool | None = None


class _Model(msgspec.Struct):
    dtypes: Annotated[dict[str, int], msgspec.Meta(min_length=1)]
    attention: str | None = None
    experts: str | None = None
    parameters_dtype: str | None = None
    buffers_dtype: str | None = None
    outputs_dtype: str | None = None


_Word = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,40}$")]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class _EngineArguments(msgspec.Struct):
    max_num_seqs: _Count | None = None
    max_num_batched_tokens: _Count | None = None
    quantization: _Word | None = None
    enforce_eager: bool | None = None
    kv_cache_dtype: _Word | None = None
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)] | _Word | None = None


class _Scoring(msgspec.Struct):
    torch: _Torch
    model: _Model
    temperature: float | None = None
    engine: str | None = None
    scoring_function: str | None = None
    fused_lm_head: str | None = None
    grad_enabled: bool | None = None
    training_mode: bool | None = None
    cast_lm_head_to_fp32: bool | None = None
    gradient_checkpointing: bool | None = None
    rows_a_forward: int | None = None
    parameters_dtype: str | None = None
    logprobs_dtype: str | None = None
    attended_tokens: _Count | None = None


def _factory() -> str:
    return f"or build the model yourself with {option('model_factory', 'MODULE:FUNCTION')}"


def check_contract(contract: Contract, where: str) -> None:
    try:
        read = msgspec.convert(contract, _Scoring)
    except msgspec.ValidationError as error:
        raise CannotReplay(f"{where}: the contract cannot be replayed ({error})") from error
    autocast = (read.torch.autocast_dtype or "None").removeprefix("torch.")
    model = read.model
    casts = (read.parameters_dtype, model.parameters_dtype, model.buffers_dtype, model.outputs_dtype)
    for dtype in (None if autocast == "None" else autocast, *casts):
        if dtype is not None:
            check_dtype(dtype)


def check_scoring(contract: Contract) -> None:
    for field, allowed in (("scoring_function", (*SCORING_FUNCTIONS, *PACKED_LOSSES)), ("fused_lm_head", FUSED_HEADS)):
        name = contract.get(field)
        if contract.get("engine") == "trl" and contract.get("fused_lm_head") and name not in allowed:
            raise CannotReplay(
                f"the recorded {field} {_named(name)} is not part of TRL, so it is not called; "
                f"replay a trace from TRL's own trainers, {_factory()}"
            )


def check_attention(
    name: str, experts: str | None = None, *, allowed: Collection[str] = (), is_own_model: bool = False
) -> None:
    """Raise CannotReplay unless the attention is built in or `allowed`, and the experts use torch's own code. A model
    from the user's factory may use any attention that is not a hub path."""
    if name not in (*ATTENTIONS, *allowed) and not (is_own_model and re.fullmatch(r"\w+", name)):
        raise CannotReplay(
            f"the recorded attention {_named(name)} is not trusted, so it is not loaded; {_factory()[3:]}"
        )
    if experts not in (None, *EXPERTS):
        raise CannotReplay(
            f"the recorded experts {_named(experts)} are not trusted, so they are not loaded; {_factory()[3:]}"
        )


def attention_here(
    name: str, path: str, allowed: Collection[str], *, is_half: bool, device: str
) -> tuple[str, str | None]:
    """Return the attention to run, and the reason (a key in WHY) if it differs from the recorded one, else None."""
    name = name.removeprefix("paged|")  # this prefix matters only when generating
    cls = model_class(path)
    code = None
    if name in _FLASH or "/" in name:
        name, code = _flash_here(name, getattr(cls, "_compatible_flash_implementations", None) or (), allowed, device)
        code = code or (None if is_half else NEEDS_16_BITS)
    elif name not in ATTENTIONS:
        code = UNKNOWN
    return (name, None) if code is None else ("sdpa" if getattr(cls, "_supports_sdpa", True) else "eager", code)


def _flash_here(name: str, of_model: Sequence[str], allowed: Collection[str], device: str) -> tuple[str, str | None]:
    from transformers import modeling_flash_attention_utils as flash
    from transformers.utils import import_utils

    is_installed = getattr(import_utils, _FLASH.get(name, ""), None)
    if of_model and name not in of_model:
        name = of_model[0]  # transformers uses this attention for the model even if another was requested
    elif name in _FLASH:
        if device != "cpu" and is_installed is not None and is_installed():
            return name, None
        name = getattr(flash, "FLASH_ATTN_KERNEL_FALLBACK", {}).get(name, name)
        if name not in allowed:
            return name, NOT_INSTALLED
    if name not in allowed:
        return name, KERNEL_NOT_ALLOWED
    return name, None if import_utils.is_kernels_available() else NOT_INSTALLED


def check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise CannotReplay(
            f"the recorded dtype {_named(name)} is unknown; the trace may be damaged (known dtypes: "
            f"{', '.join(DTYPES)})"
        )


def model_class(path: str) -> Any:
    """Return the transformers language model class named `path`, which may include its module. Only names in
    transformers' own lists are imported. Raises CannotReplay."""
    with collector_paused():
        import transformers
        from transformers.models.auto import modeling_auto

    module, _, name = path.rpartition(".")
    listed = {
        entry
        for kind in _MODEL_LISTS
        for names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values()
        for entry in ((names,) if isinstance(names, str) else names)
    }
    with collector_paused():  # transformers imports the class on first access
        found = getattr(transformers, name, None) if name in listed else None
    if found is None or module not in ("", "transformers", found.__module__, found.__module__.rpartition(".")[0]):
        raise CannotReplay(
            f"the model cannot be rebuilt: the class {_named(path)} is not a language model in "
            "the installed transformers, so it is not imported; install the transformers version recorded in the "
            f"trace (see tim-trace info), {_factory()}"
        )
    return found


def safe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the fields that would make transformers fetch, import or run something, at any depth.
    Raises CannotReplay for impossible sizes."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in _DROPPED or (name.startswith("__") and name.endswith("__")):
            continue
        if name in ("dtype", "torch_dtype") and str(value).removeprefix("torch.") not in DTYPES:
            continue
        if name == "architecture" and ":" in str(value):  # in timm, a prefix with a colon is a download source
            raise CannotReplay(
                f"the model config's architecture {_named(value)} refers to external code; {_factory()[3:]}"
            )
        found[name] = _safe_value(name, value)
    return found


def safe_engine_arguments(recorded: Any) -> dict[str, Any]:
    try:
        found = msgspec.to_builtins(msgspec.convert(recorded or {}, _EngineArguments))
    except msgspec.ValidationError as error:
        raise CannotReplay(f"engine vllm: the recorded engine arguments cannot be used ({error})") from error
    return {name: value for name, value in found.items() if value is not None}


def _safe_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return safe_config(value)
    if isinstance(value, list):
        return [_safe_value(name, item) for item in value]
    if isinstance(value, int) and (abs(value) >= 1 << 40 or (value > _MOST and _COUNTS.search(name))):
        raise CannotReplay(
            f"the model config sets {_named(name)} to the impossible value {value:,}; the trace may be damaged"
        )
    return value


def _named(value: Any) -> str:
    return ascii(value)[:200]
