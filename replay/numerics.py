"""Numeric settings for an arm's transformers model: the recorded contract plus the arm's changes."""

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
        """Model dtype (torch name), from the arm or else from the recorded parameters."""
        if self.arm.dtype:
            return DTYPES[self.arm.dtype]
        dtypes: dict[str, int] = self.recorded["model"]["dtypes"]
        return self._parameters_dtype or max(dtypes, key=lambda name: dtypes[name])

    @property
    def weights_dtype(self) -> str | None:
        """Dtype to round all weights to (torch name), or None to keep the recorded dtypes."""
        return self.dtype if self.arm.dtype or self._parameters_dtype else None

    @property
    def _parameters_dtype(self) -> str | None:
        return self.recorded["model"].get("parameters_dtype") or self.recorded.get("parameters_dtype")

    @property
    def buffers_dtype(self) -> Any:
        """torch dtype to which FSDP cast buffers (rotary frequencies), or None if they were not cast."""
        return self._cast("buffers_dtype")

    @property
    def outputs_dtype(self) -> Any:
        """torch dtype to which FSDP rounded the logprobs. None if it did not, or if the model returned logits."""
        return self._cast("outputs_dtype") if self.recorded.get("fused_lm_head") and not self._is_exact else None

    def _cast(self, name: str) -> Any:
        recorded = None if self.arm.dtype else self.recorded["model"].get(name)
        return getattr(torch, recorded) if recorded else None

    @property
    def is_tree(self) -> bool:
        is_possible = not self._is_shaped and self.arm.attention in (None, *PACKABLE)
        return self.recorded.get("packing") == PREFIX_TREE and is_possible

    @property
    def is_packed(self) -> bool:
        return self.recorded.get("packing") == PACKED_ROWS and not self._is_shaped

    @property
    def _is_shaped(self) -> bool:
        arm = self.arm
        is_cached = arm.cached_tokens is not None
        return bool(arm.has_batch_shape or arm.padding or arm.compile or is_cached or self._is_exact)

    @property
    def _is_exact(self) -> bool:
        return self.arm.engine == EXACT

    @property
    def attention(self) -> str:
        if self._is_exact:
            return EXACT
        if self.arm.padding == PACKED or self.is_tree:
            return packing.NAME
        # Rows recorded as a prefix tree but replayed without one use sdpa instead of the recorded implementation.
        recorded = "sdpa" if self.recorded.get("packing") == PREFIX_TREE else str(self.recorded["model"]["attention"])
        return recorded if self.arm.attention is None else KERNELS[self.arm.attention].implementation

    @property
    def experts(self) -> str | None:
        """transformers' name for the experts implementation. Only `eager` supports float64."""
        recorded = self.recorded["model"].get("experts")
        return "eager" if recorded and self.arm.dtype == "fp64" else recorded

    @property
    def uses_trl(self) -> bool:
        arm = self.arm
        own = (arm.logits_dtype, arm.temperature, arm.top_p, arm.top_k, arm.cached_tokens)
        shaped = arm.padding == PACKED or arm.compile or arm.dtype == "fp64" or self._is_exact
        shaped = shaped or (self.recorded.get("packing") == PREFIX_TREE and not self.is_tree)
        # `trl.scores` comes last, because it imports TRL.
        return not shaped and all(value is None for value in own) and trl.scores(self.recorded)

    @property
    def temperature(self) -> float:
        return float(self.arm.temperature or self.recorded.get("temperature") or 1.0)

    @property
    def head_in_fp32(self) -> bool:
        return self.arm.lm_head == "fp32" or bool(self.recorded.get("cast_lm_head_to_fp32"))

    @property
    def logits_dtype(self) -> Any:
        if self.arm.logits_dtype:
            return getattr(torch, DTYPES[self.arm.logits_dtype])
        recorded = None if self.arm.dtype else self.recorded.get("logprobs_dtype")
        return getattr(torch, recorded) if recorded in (DTYPES["bf16"], DTYPES["fp16"]) else None

    @property
    def autocast(self) -> Any:
        return None if self.arm.dtype else autocast_dtype(self.recorded)

    @property
    def projection_dtype(self) -> Any:
        return torch.float32 if self.head_in_fp32 else self.autocast
