"""A scenario: the settings of one trace, without its fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from heads import UNCHANGED, Head, Sampling
from sides import Side, State
from tiny_models import TinyModel

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

NUMERICS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({"dtype": _FP32}, {"dtype": _FP32}),
    "bf16-fp32": ({"dtype": _BF16}, {"dtype": _FP32}),
    "bf16-autocast": ({"dtype": _BF16}, {"dtype": _FP32, "autocast": _BF16}),
    "bf16-bf16": ({"dtype": _BF16, "shards": 2}, {"dtype": _BF16}),
    "fp16-fp32": ({"dtype": _FP16}, {"dtype": _FP32}),
    "fp16-fp16": ({"dtype": _FP16, "shards": 2}, {"dtype": _FP16}),
    "fp32-autocast": ({"dtype": _FP32}, {"dtype": _FP32, "autocast": _BF16}),
    "tf32-fp32": ({"dtype": _FP32, "input_bits": 10}, {"dtype": _FP32}),
}
"""Numerics of engine and trainer (see Side), by name. Two sides that round alike differ in batches and shards."""


@dataclass(slots=True, kw_only=True)
class Scenario:
    """The settings of one trace, without its fault: model, numerics, shapes and sampling."""

    model: TinyModel
    seed: int
    numerics: str = "fp32"
    num_steps: int = 4
    num_groups: int = 4
    group_size: int = 8
    sampling: Sampling = UNCHANGED
    first_version: int = 0
    versions_a_step: int = 1
    states: list[State] = field(default_factory=list)
    """The trainer's weights by policy version."""
    max_tokens: int = 0
    num_prompts: int = 0
    """Size of the prompt set from which steps draw; 0: every step has new prompts."""
    tool_words: int = 0
    """Number of words of tool output in each response; 0: no tool."""
    prompt_tail: int = 0
    """Number of final prompt tokens that the trainer counts as response tokens."""
    engine_rows: int = 64
    trainer_rows: int = 8
    replayed_routing: bool = False
    """If True, the engine without the fault replays the trainer's expert choices."""
    same_engine: bool = False
    """If True, the trainer scores by decoding like the engine, so that both agree bit for bit."""

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.group_size

    def version(self, index: int) -> int:
        """Return the policy version of the trainer's weights at the step with this index."""
        return min(self.first_version + self.versions_a_step * index, len(self.states) - 1)

    def rollout(self, version: int) -> Side:
        """The engine without a fault."""
        numerics = NUMERICS[self.numerics][0]
        return self.model.side(
            self.states[version], attention="eager", rows=self.engine_rows, head=self._head, **numerics
        )

    def train(self, version: int) -> Side:
        """The trainer without a fault."""
        if self.same_engine:
            return self.rollout(version)
        numerics = NUMERICS[self.numerics][1]
        # The other kernels omit the soft cap of attention scores, which would be a fault.
        capped = getattr(self.model.config, "attn_logit_softcapping", None) is not None
        attention = "eager" if capped else "sdpa"
        return self.model.side(
            self.states[version], attention=attention, rows=self.trainer_rows, head=self._head, **numerics
        )

    @property
    def _head(self) -> Head:
        return Head(sampling=Sampling(temperature=self.sampling.temperature))
