"""The numeric settings of an arm's transformers model: the recorded contract plus the arm's changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..schemas.documents import PACKED_ROWS, PREFIX_TREE, Contract
from .arm_option import EXACT
from .arms import DTYPES, PACKABLE, Arm
from .backends import packing, trl
from .backends.kernels import KERNELS
from .batching import PACKED
from .settings import autocast_dtype


@dataclass(frozen=True, slots=True)
class Numerics:
    arm: Arm
    recorded: Contract

    @property
    def dtype(self) -> str:
        """torch's name for the model's dtype: the arm's, or that of the parameters in the recorded forward pass."""
        if self.arm.dtype:
            return DTYPES[self.arm.dtype]
        dtypes: dict[str, int] = self.recorded["model"]["dtypes"]
        return self._parameters_dtype or max(dtypes, key=lambda name: dtypes[name])

    @property
    def weights_dtype(self) -> str | None:
        """torch's name for the dtype to which all weights are rounded; None if each keeps its own."""
        return self.dtype if self.arm.dtype or self._parameters_dtype else None

    @property
    def _parameters_dtype(self) -> str | None:
        """Name of the dtype to which FSDP cast the parameters for the recorded forward pass."""
        return self.recorded["model"].get("parameters_dtype") or self.recorded.get("parameters_dtype")

    @property
    def buffers_dtype(self) -> Any:
        """torch dtype to which FSDP cast buffers (rotary frequencies); None if it cast none or the arm sets one."""
        return self._cast("buffers_dtype")

    @property
    def outputs_dtype(self) -> Any:
        """torch dtype to which FSDP rounded the model's logprobs; None if it did not, or if the arm sets a dtype.

        Logits need no rounding: FSDP also cast the head's weights, so they already have this dtype.
        """
        return self._cast("outputs_dtype") if self.recorded.get("fused_lm_head") and not self._is_exact else None

    def _cast(self, name: str) -> Any:
        recorded = None if self.arm.dtype else self.recorded["model"].get(name)
        return getattr(torch, recorded) if recorded else None

    @property
    def is_tree(self) -> bool:
        """True if rows run in the recorded prefix tree."""
        return (
            self.recorded.get("packing") == PREFIX_TREE
            and not self._is_shaped
            and self.arm.attention in (None, *PACKABLE)
        )

    @property
    def is_packed(self) -> bool:
        """True if rows run end to end, as recorded."""
        return self.recorded.get("packing") == PACKED_ROWS and not self._is_shaped

    @property
    def _is_shaped(self) -> bool:
        arm = self.arm
        is_cached = arm.cached_tokens is not None
        return bool(arm.has_batch_shape or arm.padding or arm.compile or is_cached or self._is_exact)

    @property
    def _is_exact(self) -> bool:
        """True for the exact engine, which has its own attention and scoring and computes each row alone."""
        return self.arm.engine == EXACT

    @property
    def attention(self) -> str:
        """transformers' name for the attention implementation; `exact` for the exact engine."""
        if self._is_exact:
            return EXACT
        if self.arm.padding == PACKED or self.is_tree:
            return packing.NAME
        # Other attention implementations cannot run the recorded tree.
        recorded = "sdpa" if self.recorded.get("packing") == PREFIX_TREE else str(self.recorded["model"]["attention"])
        return recorded if self.arm.attention is None else KERNELS[self.arm.attention].implementation

    @property
    def experts(self) -> str | None:
        """transformers' name for the experts implementation. Only `eager` computes in float64."""
        recorded = self.recorded["model"].get("experts")
        return "eager" if recorded and self.arm.dtype == "fp64" else recorded

    @property
    def uses_trl(self) -> bool:
        """True if TRL's own code does the scoring, as it does for every arm that it supports."""
        arm = self.arm
        own = (arm.logits_dtype, arm.temperature, arm.top_p, arm.top_k, arm.cached_tokens)
        shaped = arm.padding == PACKED or arm.compile or arm.dtype == "fp64" or self._is_exact
        shaped = shaped or (self.recorded.get("packing") == PREFIX_TREE and not self.is_tree)
        # TRL is imported last, and only for an arm that TRL can score.
        return not shaped and all(value is None for value in own) and trl.scores(self.recorded)

    @property
    def temperature(self) -> float:
        return float(self.arm.temperature or self.recorded.get("temperature") or 1.0)

    @property
    def head_in_fp32(self) -> bool:
        """True if the head projects in float32, whatever the other dtypes are."""
        return self.arm.lm_head == "fp32" or bool(self.recorded.get("cast_lm_head_to_fp32"))

    @property
    def logits_dtype(self) -> Any:
        """torch dtype of logits and everything computed from them, set by the arm or recorded; None for the default."""
        if self.arm.logits_dtype:
            return getattr(torch, DTYPES[self.arm.logits_dtype])
        recorded = None if self.arm.dtype else self.recorded.get("logprobs_dtype")
        return getattr(torch, recorded) if recorded in (DTYPES["bf16"], DTYPES["fp16"]) else None

    @property
    def autocast(self) -> Any:
        """torch dtype of the recorded autocast; None without autocast, or if the arm sets a dtype."""
        return None if self.arm.dtype else autocast_dtype(self.recorded)

    @property
    def projection_dtype(self) -> Any:
        """torch dtype of the head's projection; None to use the dtype of the hidden states."""
        return torch.float32 if self.head_in_fp32 else self.autocast
