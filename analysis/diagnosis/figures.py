"""Published figures of the mismatch between trainer and engine, each under the definition that it was measured by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    """A measured value, or the range of several."""

    metric: str
    """Column of `stats` with the same definition: over tokens, d in nats."""
    low: float
    high: float
    dtypes: tuple[str, str]
    """What trainer and engine computed in; an empty text where it is not said."""
    engines: str
    model: str
    setting: str
    source: str
    is_fault: bool = False
    """Whether the run that it was measured in was broken."""


def _same(dtype: str) -> tuple[str, str]:
    return dtype, dtype


_AKN = "AknA13/train-infer-mismatch"
_FAST = "Fast-LLM#525"
_BF16, _FP32, _FP16 = "bfloat16", "float32", "float16"

FIGURES = (
    PublishedFigure(
        metric="mean_abs_d", low=5.6e-4, high=5.6e-4, dtypes=_same(_FP32), engines="transformers, vLLM 0.12",
        model="8B dense", setting="both sides float32", source=_AKN,
    ),
    PublishedFigure(
        metric="rms_d", low=1.9e-3, high=1.9e-3, dtypes=_same(_FP32), engines="transformers, vLLM 0.12",
        model="8B dense", setting="both sides float32", source=_AKN,
    ),
    PublishedFigure(
        metric="max_abs_d", low=0.166, high=0.166, dtypes=_same(_FP32), engines="transformers, vLLM 0.12",
        model="8B dense", setting="both sides float32", source=_AKN,
    ),
    PublishedFigure(
        metric="rms_d", low=2.2e-3, high=2.2e-3, dtypes=_same(_FP32), engines="Fast-LLM, vLLM", model="0.5B dense",
        setting="both sides float32", source=_FAST,
    ),
    PublishedFigure(
        metric="mean_abs_d", low=1.5e-3, high=1.5e-3, dtypes=_same(_FP16), engines="transformers, vLLM 0.12",
        model="8B dense", setting="both sides float16", source=_AKN,
    ),
    PublishedFigure(
        metric="rms_d", low=5.0e-3, high=5.0e-3, dtypes=_same(_FP16), engines="transformers, vLLM 0.12",
        model="8B dense", setting="both sides float16", source=_AKN,
    ),
    PublishedFigure(
        metric="k3", low=1e-5, high=1e-5, dtypes=_same(_FP16), engines="transformers, vLLM", model="8B dense",
        setting="both sides float16", source=f"{_AKN}; arXiv 2510.26788",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.0117, high=0.014, dtypes=_same(_BF16), engines="transformers, vLLM 0.12",
        model="1.7B and 8B dense", setting="both sides bfloat16 (837k tokens, H200)", source=_AKN,
    ),
    PublishedFigure(
        metric="rms_d", low=0.0398, high=0.045, dtypes=_same(_BF16), engines="transformers, vLLM 0.12",
        model="1.7B and 8B dense", setting="both sides bfloat16 (837k tokens, H200)", source=_AKN,
    ),
    PublishedFigure(
        metric="k3", low=7.8e-4, high=1e-3, dtypes=_same(_BF16), engines="transformers, vLLM 0.12",
        model="1.7B and 8B dense", setting="both sides bfloat16 (837k tokens, H200)", source=_AKN,
    ),
    PublishedFigure(
        metric="share_outside", low=0.006, high=0.006, dtypes=_same(_BF16), engines="transformers, vLLM 0.12",
        model="8B dense", setting="both sides bfloat16 (837k tokens, H200)", source=_AKN,
    ),
    PublishedFigure(
        metric="rms_d", low=0.0306, high=0.0321, dtypes=_same(_BF16), engines="Fast-LLM, vLLM", model="0.5B dense",
        setting="bfloat16 with float32 heads", source=_FAST,
    ),
    PublishedFigure(
        metric="rms_d", low=0.039, high=0.0407, dtypes=_same(_BF16), engines="Fast-LLM, vLLM", model="0.5B dense",
        setting="bfloat16, a float32 head on one side", source=_FAST,
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.011, high=0.011, dtypes=_same(_BF16), engines="Megatron, SGLang or vLLM",
        model="4B dense", setting="slime, temperature handled alike", source="vime#64",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.036, high=0.036, dtypes=_same(_BF16), engines="Megatron, SGLang", model="4B dense",
        setting="slime, raw against temperature-scaled logprobs: a fault", is_fault=True, source="vime#64",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.041, high=0.041, dtypes=_same(_BF16), engines="Megatron, vLLM", model="",
        setting="tensor parallel 8", source="vime#66",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.12, high=0.22, dtypes=_same(_BF16), engines="Megatron, vLLM", model="",
        setting="tensor parallel 16 across hosts: a fault", is_fault=True, source="vime#66",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.0165, high=0.0165, dtypes=_same(_BF16), engines="SkyRL, vLLM", model="35B-A3B mixture",
        setting="engines as they are", source="IsoExec, vllm.ai 2026-08-21",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=6.7e-7, high=6.7e-7, dtypes=_same(_BF16), engines="SkyRL, vLLM", model="35B-A3B mixture",
        setting="one execution contract on both sides", source="IsoExec, vllm.ai 2026-08-21",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.05, high=0.369, dtypes=_same(_BF16), engines="Megatron, SGLang", model="mixture",
        setting="routers left to themselves", source="miles#2722",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.0052, high=0.0052, dtypes=_same(_BF16), engines="Megatron, SGLang", model="mixture",
        setting="expert ids, weights and slots replayed", source="miles#2722",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.022, high=0.022, dtypes=_same(_BF16), engines="SkyRL, vLLM", model="GLM with LoRA",
        setting="adapter on both sides", source="SkyRL#2182",
    ),
    PublishedFigure(
        metric="max_abs_d", low=1.56, high=1.56, dtypes=_same(_BF16), engines="torchtitan, vLLM", model="8B dense",
        setting="kernels not batch-invariant", source="torchtitan docs/bitwise_parity.md",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=4.5e-4, high=4.5e-4, dtypes=_same(_BF16), engines="slime, SGLang", model="4B dense",
        setting="true on-policy mode, as its regression test has it", source="slime",
    ),
    PublishedFigure(
        metric="mean_abs_d", low=0.0386, high=0.0386, dtypes=(_BF16, "float8"), engines="transformers, vLLM 0.12",
        model="8B dense", setting="float8 KV cache", source=_AKN,
    ),
    PublishedFigure(
        metric="rms_d", low=0.131, high=0.131, dtypes=(_BF16, "float8"), engines="transformers, vLLM 0.12",
        model="8B dense", setting="float8 KV cache", source=_AKN,
    ),
    PublishedFigure(
        metric="k1", low=1.4e-3, high=5e-3, dtypes=(_BF16, "float8"), engines="NeMo-RL, vLLM", model="9B and 35B",
        setting="float8 weights (NeMo's gen_kl); above 2 something is broken", source="NeMo-RL#3477",
    ),
    PublishedFigure(
        metric="k3", low=1e-5, high=1e-3, dtypes=_same(_BF16), engines="Miles, SGLang", model="dense",
        setting="over a run", source="Miles and SGLang, All-in-One",
    ),
    PublishedFigure(
        metric="k3", low=1e-3, high=1e-1, dtypes=_same(_BF16), engines="Miles, SGLang", model="mixture",
        setting="over a run", source="Miles and SGLang, All-in-One",
    ),
    PublishedFigure(
        metric="k3", low=5e-4, high=1e-3, dtypes=_same(_BF16), engines="verl, vLLM", model="14B dense", setting="H20",
        source="richardli.xyz/rl-collapse 3.5",
    ),
    PublishedFigure(
        metric="k3", low=1e-3, high=1e-2, dtypes=_same(_BF16), engines="verl, vLLM", model="14B dense", setting="L20",
        source="richardli.xyz/rl-collapse 3.5",
    ),
    PublishedFigure(
        metric="k3", low=1e-2, high=1.0, dtypes=_same(_BF16), engines="verl, vLLM", model="14B dense",
        setting="A100 with cascade attention: a fault", is_fault=True, source="richardli.xyz/rl-collapse 3.5",
    ),
)  # fmt: skip
"""The noise floor, as far as it was published; fault marks figures of runs that were broken."""
