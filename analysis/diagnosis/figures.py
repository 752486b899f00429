"""Published values for the mismatch between trainer and engine, each with its original definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    metric: str
    """The `stats` column with the same definition as the published value (d in nats)."""
    low: float
    high: float
    dtypes: tuple[str, str]
    engines: str
    model: str
    setting: str
    source: str
    is_mixture: bool = False
    is_fault: bool = False
    """True if measured in a run with a fault."""


def _published(
    dtypes: str | tuple[str, str], engines: str, model: str, setting: str, source: str,
    values: Mapping[str, float | tuple[float, float]], **marks: bool,
) -> Iterator[PublishedFigure]:  # fmt: skip
    sides = (dtypes, dtypes) if isinstance(dtypes, str) else dtypes
    for metric, value in values.items():
        low, high = value if isinstance(value, tuple) else (value, value)
        yield PublishedFigure(
            metric=metric, low=low, high=high, dtypes=sides, engines=engines, model=model, setting=setting, source=source,
            **marks,
        )  # fmt: skip


_AKN = "AknA13/train-infer-mismatch"
_BF16, _FP32, _FP16, _FP8 = "bfloat16", "float32", "float16", "float8"

FIGURES = (
    *_published(_FP32, "transformers, vLLM 0.12", "8B dense", "both sides float32",
                _AKN, {"mean_abs_d": 0.00056, "rms_d": 0.0019, "max_abs_d": 0.166}),
    *_published(_FP32, "Fast-LLM, vLLM", "0.5B dense", "both sides float32", "Fast-LLM#525", {"rms_d": 0.0022}),
    *_published(_FP16, "transformers, vLLM 0.12", "8B dense", "both sides float16",
                _AKN, {"mean_abs_d": 0.0015, "rms_d": 0.005}),
    *_published(_FP16, "transformers, vLLM", "8B dense", "both sides float16",
                f"{_AKN}; arXiv 2510.26788", {"k3": 1e-05}),
    *_published(_BF16, "transformers, vLLM 0.12", "1.7B and 8B dense", "both sides bfloat16 (837k tokens, H200)",
                _AKN, {"mean_abs_d": (0.0117, 0.014), "rms_d": (0.0398, 0.045), "k3": (0.00078, 0.001)}),
    *_published(_BF16, "transformers, vLLM 0.12", "8B dense", "both sides bfloat16 (837k tokens, H200)",
                _AKN, {"share_outside": 0.006}),
    *_published(_BF16, "Fast-LLM, vLLM", "0.5B dense", "bfloat16 with float32 heads",
                "Fast-LLM#525", {"rms_d": (0.0306, 0.0321)}),
    *_published(_BF16, "Fast-LLM, vLLM", "0.5B dense", "bfloat16, a float32 head on one side",
                "Fast-LLM#525", {"rms_d": (0.039, 0.0407)}),
    *_published(_BF16, "Megatron, SGLang or vLLM", "4B dense", "slime, same temperature handling on both sides",
                "vime#64", {"mean_abs_d": 0.011}),
    *_published(_BF16, "Megatron, SGLang", "4B dense", "slime, raw logprobs compared with temperature-scaled ones: a fault",
                "vime#64", {"mean_abs_d": 0.036}, is_fault=True),
    *_published(_BF16, "Megatron, vLLM", "", "tensor parallel 8", "vime#66", {"mean_abs_d": 0.041}),
    *_published(_BF16, "Megatron, vLLM", "", "tensor parallel 16 across hosts: a fault",
                "vime#66", {"mean_abs_d": (0.12, 0.22)}, is_fault=True),
    *_published(_BF16, "SkyRL, vLLM", "35B-A3B mixture", "unmodified engines",
                "IsoExec, vllm.ai 2026-08-21", {"mean_abs_d": 0.0165}, is_mixture=True),
    *_published(_BF16, "SkyRL, vLLM", "35B-A3B mixture", "the same execution contract on both sides",
                "IsoExec, vllm.ai 2026-08-21", {"mean_abs_d": 6.7e-07}, is_mixture=True),
    *_published(_BF16, "Megatron, SGLang", "mixture", "expert choices not replayed",
                "miles#2722", {"mean_abs_d": (0.05, 0.369)}, is_mixture=True),
    *_published(_BF16, "Megatron, SGLang", "mixture", "expert ids, weights and slots replayed",
                "miles#2722", {"mean_abs_d": 0.0052}, is_mixture=True),
    *_published(_BF16, "SkyRL, vLLM", "GLM with LoRA", "adapter on both sides", "SkyRL#2182", {"mean_abs_d": 0.022}),
    *_published(_BF16, "torchtitan, vLLM", "8B dense", "kernels not batch-invariant",
                "torchtitan docs/bitwise_parity.md", {"max_abs_d": 1.56}),
    *_published(_BF16, "slime, SGLang", "4B dense", "true on-policy mode, per its regression test",
                "slime", {"mean_abs_d": 0.00045}),
    *_published((_BF16, _FP8), "transformers, vLLM 0.12", "8B dense", "float8 KV cache",
                _AKN, {"mean_abs_d": 0.0386, "rms_d": 0.131}),
    *_published((_BF16, _FP8), "NeMo-RL, vLLM", "9B and 35B", "float8 weights (NeMo's gen_kl); a value above 2 means that something is broken",
                "NeMo-RL#3477", {"k1": (0.0014, 0.005)}),
    *_published(_BF16, "Miles, SGLang", "dense", "over a run", "Miles and SGLang, All-in-One", {"k3": (1e-05, 0.001)}),
    *_published(_BF16, "Miles, SGLang", "mixture", "over a run",
                "Miles and SGLang, All-in-One", {"k3": (0.001, 0.1)}, is_mixture=True),
    *_published(_BF16, "verl, vLLM", "14B dense", "H20", "richardli.xyz/rl-collapse 3.5", {"k3": (0.0005, 0.001)}),
    *_published(_BF16, "verl, vLLM", "14B dense", "L20", "richardli.xyz/rl-collapse 3.5", {"k3": (0.001, 0.01)}),
    *_published(_BF16, "verl, vLLM", "14B dense", "A100 with cascade attention: a fault",
                "richardli.xyz/rl-collapse 3.5", {"k3": (0.01, 1.0)}, is_fault=True),
)  # fmt: skip
